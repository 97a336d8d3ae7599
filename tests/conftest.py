"""Make the script importable from the tests, wherever pytest is started, and compute on one thread, as it does."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy comes with torch
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
torch.set_num_threads(1)
