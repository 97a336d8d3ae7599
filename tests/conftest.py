"""Make the script importable from the tests, wherever pytest is started, and compute on one thread, as it does."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy comes with torch
import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Let each file begin on one thread, whatever an earlier one left: matrices this small only lose on two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
