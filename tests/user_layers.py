"""Layers as people write them.  Those in ALLOWED train as in a plain PyTorch loop; those in REFUSED would not.

A docstring says what is special about a layer."""

import functools
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint


def complex_dtype():
    """Return the complex dtype of the default one."""
    return torch.get_default_dtype().to_complex()


# Allowed --------------------------------------------------------------------------------------------------------------


class Fourier(nn.Module):
    """No parameters at all (FNet): the pair differs by the layer alone."""

    def __init__(self, channels, length, h):
        super().__init__()

    def forward(self, x):
        return torch.fft.fft2(x).real


class FourierBlock(nn.Module):
    """FNet's block: at large learning rates rounding grows, and shows in a run's last bits what else it depends on."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x):
        return self.norm(x + torch.fft.fft2(x).real)


class RealFilter(nn.Module):
    """A Fourier neural operator whose complex weight is kept as pairs of real numbers."""

    def __init__(self, channels, length, h, modes=4):
        super().__init__()
        self.modes = modes
        weight = torch.randn(channels, channels, modes, dtype=complex_dtype()) / channels
        self.weight = nn.Parameter(torch.view_as_real(weight))

    def forward(self, x):
        spectrum = torch.fft.rfft(x, dim=1)
        weight = torch.view_as_complex(self.weight.contiguous())
        low = torch.einsum("bki,iok->bko", spectrum[:, : self.modes], weight)
        return x + torch.fft.irfft(F.pad(low, (0, 0, 0, spectrum.shape[1] - self.modes)), n=x.shape[1], dim=1)


class ComplexFilter(nn.Module):
    """Complex parameters behind an odd number of real ones, and a single number without a shape."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.weight = nn.Parameter(0.5 * torch.randn(length // 2 + 1, channels, dtype=complex_dtype()))
        self.shift = nn.Parameter(torch.randn(channels))
        self.turn = nn.Parameter(torch.randn((), dtype=complex_dtype()))

    def forward(self, x):
        filtered = torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.weight * self.turn, n=x.shape[1], dim=1)
        return x + self.scale * filtered + self.shift


class ComplexBuffer(nn.Module):
    """A complex buffer that is drawn, beside one parameter that is stored transposed."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.register_buffer("phase", torch.randn(length // 2 + 1, channels, dtype=complex_dtype()))
        self.weight = nn.Parameter(torch.randn(length, channels).t())

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.phase, n=x.shape[1], dim=1) * self.weight.t()


class FixedAttribute(nn.Module):
    """A random matrix in a plain attribute: each run has its own."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.matrix = torch.randn(channels, channels)
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        return x + self.scale * torch.tanh(x @ self.matrix)


class Buffered(nn.Module):
    """Buffers that are drawn, one of them in whole numbers; the second parameter decides on a branch."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.scale, self.sign = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.randn(1))
        self.register_buffer("pattern", torch.randn(length, channels))
        self.register_buffer("order", torch.randperm(length), persistent=False)

    def forward(self, x):
        moved = self.scale * self.pattern * x[:, self.order]
        return x + moved * self.sign if self.sign > 0 else x - 2 * moved * self.sign


class Frozen(nn.Module):
    """Some parameters need no gradient."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.fixed = nn.Linear(length, length).requires_grad_(False)
        self.free = nn.Linear(channels, channels)

    def forward(self, x):
        return x + self.free(self.fixed(x.transpose(1, 2)).transpose(1, 2))


class Checkpointed(nn.Module):
    """Computes its forward pass again in the backward pass."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(length, 2 * length), nn.Tanh(), nn.Linear(2 * length, length))

    def forward(self, x):
        return x + checkpoint(self.net, x.transpose(1, 2), use_reentrant=False).transpose(1, 2)


class Flattened(nn.Module):
    """`view` wants tokens that lie together in memory."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.dense = nn.Linear(channels * length, channels * length)

    def forward(self, x):
        return x + self.dense(x.view(x.size(0), -1)).view(x.shape)


class Attention(nn.Module):
    """PyTorch's own attention, whose fast paths warn."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.attention = nn.MultiheadAttention(channels, 1, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Transformer(nn.Module):
    """A whole encoder layer, without dropout."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(channels, 1, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.inner(x)


class LastMap(nn.Module):
    """Attention by hand that keeps its last map, for somebody to look at; nothing hangs on it."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.query, self.key = nn.Linear(channels, channels), nn.Linear(channels, channels, bias=False)
        self.last_map = None

    def forward(self, x):
        self.last_map = torch.softmax(self.query(x) @ self.key(x).transpose(1, 2), dim=-1)
        return x + self.last_map @ x


class Recurrent(nn.Module):
    """A recurrent network of its own, whose weights are kept in a list too."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.lstm, self.out = nn.LSTM(channels, 8, batch_first=True), nn.Linear(8, channels)

    def forward(self, x):
        return x + self.out(self.lstm(x)[0])


class Tied(nn.Module):
    """One weight in two modules, and one module in two places."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.one, self.two = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.two.weight = self.one.weight
        self.time = nn.Linear(length, length)
        self.again = self.time

    def forward(self, x):
        y = self.again(torch.tanh(self.time(x.transpose(1, 2)))).transpose(1, 2)
        return x + self.two(torch.tanh(self.one(y)))


class Symmetric(nn.Module):
    """The parametrisation that PyTorch's tutorial begins with."""

    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Parametrised(nn.Module):
    """Parameters that are functions of others."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Linear(channels, channels))
        self.turned = parametrizations.orthogonal(nn.Linear(channels, channels, bias=False))
        self.even = nn.Linear(length, length)
        parametrize.register_parametrization(self.even, "weight", Symmetric())

    def forward(self, x):
        return self.turned(torch.tanh(self.normed(x))) + self.even(x.transpose(1, 2)).transpose(1, 2)


class Lazy(nn.Module):
    """Parameters that get their shape from the first tokens."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(channels))

    def forward(self, x):
        return x + self.net(x)


class Compiled(nn.Module):
    """A module inside went through torch.compile."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.net = torch.compile(nn.Linear(channels, channels), backend="eager")

    def forward(self, x):
        return x + torch.tanh(self.net(x))


class Cube(torch.autograd.Function):
    """x^3 with a derivative by hand."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


class HandDerived(nn.Module):
    """An autograd.Function of one's own."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(channels))

    def forward(self, x):
        return Cube.apply(self.scale * x)


class Filling(nn.Module):
    """Writes into a tensor that it makes, and into a table that the first call makes for good."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(channels))
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.sin(torch.arange(x.shape[1], dtype=x.dtype))[:, None]
        out = torch.zeros(x.shape)
        out[:, 1:] = x[:, :-1] * self.scale
        return out + self.table


class Vectorised(nn.Module):
    """Written for one sequence and stacked by torch.vmap."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, length) / length)

    def forward(self, x):
        return x + torch.vmap(lambda one: self.weight @ one)(x)


class Cosine(nn.Module):
    """A fixed matrix that NumPy made, which is no randomness."""

    def __init__(self, channels, length, h):
        super().__init__()
        matrix = np.cos(np.pi * np.outer(np.arange(length), np.arange(length) + 0.5) / length)
        self.matrix = torch.from_numpy(matrix / length).to(torch.get_default_dtype())
        self.weight = nn.Parameter(torch.ones(length, channels))

    def forward(self, x):
        return x + self.matrix.T @ (self.weight * (self.matrix @ x))


class Square(nn.Module):
    """Its output never depends on h."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.share = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        return x + self.share * x.square()


class Stepping(nn.Module):
    """Depends on h as an ordinary number."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.h, self.mix = h, nn.Linear(channels, channels)

    def forward(self, x):
        return x + self.h * torch.tanh(self.mix(x))


class StartsAtZero(nn.Module):
    """x + a K(x) with a = 0 at the start, where h does not show yet; it does as soon as a is trained."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.share = nn.Parameter(torch.zeros(channels))
        self.decay = torch.exp(-h * torch.arange(length // 2 + 1) ** 2).to(torch.get_default_dtype())[:, None]

    def forward(self, x):
        return x + self.share * torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.decay, n=x.shape[1], dim=1)


ALLOWED = (
    *(Fourier, FourierBlock, RealFilter, ComplexFilter, ComplexBuffer, FixedAttribute, Buffered, Frozen, Checkpointed),
    *(Flattened, Attention, Transformer, LastMap, Recurrent, Tied, Parametrised, Lazy, Compiled, HandDerived, Filling),
    *(Vectorised, Cosine, Square, Stepping, StartsAtZero),
)
DEPENDS_ON_H = (Stepping, StartsAtZero)


# Refused --------------------------------------------------------------------------------------------------------------


class Scaling(nn.Module):
    """What most refused layers have: a scale, and nothing else."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        return x * self.scale


class Residual(nn.Module):
    """A branch that begins at nothing, x + a f(x) with a = 0: whatever is wrong with it does not show at the start."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.share = nn.Parameter(torch.zeros(channels))
        self.mix = nn.Linear(channels, channels)

    def forward(self, x):
        return x + self.share * self.branch(x)

    def branch(self, x):
        return self.mix(x)


class Dropout(Scaling):
    def forward(self, x):
        return F.dropout(x, 0.5) * self.scale


class LateDropout(Residual):
    def branch(self, x):
        return F.dropout(self.mix(x), 0.5)


class BatchNorm(nn.Module):
    def __init__(self, channels, length, h):
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class BatchMean(Scaling):
    def forward(self, x):
        return (x - x.mean(0)) * self.scale


class LateBatchMean(Residual):
    def branch(self, x):
        return self.mix(x - x.mean(0))


class Tuple(Scaling):
    def forward(self, x):
        return x * self.scale, None


class RunningMean(Scaling):
    """Follows the tokens' mean, and uses it at evaluation only."""

    def __init__(self, channels, length, h):
        super().__init__(channels, length, h)
        self.register_buffer("mean", torch.zeros(channels))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return (x if self.training else x - self.mean) * self.scale


class SpectralNorm(nn.Module):
    def __init__(self, channels, length, h):
        super().__init__()
        self.mix = parametrizations.spectral_norm(nn.Linear(channels, channels))

    def forward(self, x):
        return self.mix(x)


class Counter(Scaling):
    """Counts its calls, and warms up after the hundredth."""

    def __init__(self, channels, length, h):
        super().__init__(channels, length, h)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.scale * (1 if self.calls < 100 else 2)


class HiddenCounter(Scaling):
    """The same under a name that begins with an underscore."""

    def __init__(self, channels, length, h):
        super().__init__(channels, length, h)
        self._calls = 0

    def forward(self, x):
        self._calls += 1
        return x * self.scale * (1 if self._calls < 100 else 2)


class TensorCounter(Scaling):
    def __init__(self, channels, length, h):
        super().__init__(channels, length, h)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return x * self.scale * (1 if self.calls < 100 else 2)


class BareCounter(nn.Module):
    """The same in a layer without parameters."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 if self.calls < 100 else 2)


class FrozenCounter(Scaling):
    """Counts in a parameter that does not train."""

    def __init__(self, channels, length, h):
        super().__init__(channels, length, h)
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x):
        self.calls += 1
        return x * self.scale


class Teacher(nn.Module):
    """A frozen copy follows the weights, as in self-distillation: training changes what no optimiser knows of."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.student, self.teacher = nn.Linear(channels, channels), nn.Linear(channels, channels).requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())

    def forward(self, x):
        out = self.student(x) - 0.5 * self.teacher(x)
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.5)
        return out


class Single(Scaling):
    """A matrix in float32, whatever the run's dtype."""

    def __init__(self, channels, length, h):
        super().__init__(channels, length, h)
        self.table = torch.eye(channels, dtype=torch.float32)

    def forward(self, x):
        return (x * self.scale) @ self.table


class ComplexSingle(Scaling):
    """The same for complex numbers."""

    def __init__(self, channels, length, h):
        super().__init__(channels, length, h)
        self.table = torch.eye(channels, dtype=torch.complex64)

    def forward(self, x):
        return (torch.fft.fft(x * self.scale) @ self.table).real


class NoStep(Scaling):
    def __init__(self, channels, length):
        super().__init__(channels, length, 0.0)


class ByKeyword(Scaling):
    def __init__(self, *, channels, length, h):
        super().__init__(channels, length, h)


class NumPyRandom(Scaling):
    def __init__(self, channels, length, h):
        super().__init__(channels, length, h)
        self.matrix = torch.from_numpy(np.random.randn(channels, channels))  # noqa: NPY002  as people write it

    def forward(self, x):
        return (x * self.scale) @ self.matrix


class PythonRandom(Residual):
    def __init__(self, channels, length, h):
        super().__init__(channels, length, h)
        self.factor = random.random()

    def branch(self, x):
        return self.factor * self.mix(x)


class KeptView(nn.Module):
    """Keeps its weight's transpose, a view of memory that the weight may leave."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.mix = nn.Linear(channels, channels)
        self.transposed = self.mix.weight.t()

    def forward(self, x):
        return x @ self.transposed + self.mix.bias


class LateKeptView(Residual):
    def __init__(self, channels, length, h):
        super().__init__(channels, length, h)
        self.transposed = self.mix.weight.t()

    def branch(self, x):
        return x @ self.transposed + self.mix.bias


class Shared(Scaling):
    """All its objects add up in one list, which belongs to the class."""

    total: list = [0.0]  # noqa: RUF012  as people write it

    def forward(self, x):
        out = x * self.scale
        if self.scale[0] != 1:  # as soon as it has learned something
            Shared.total[0] += float(self.scale[0].detach())
        return out + 1e-3 * Shared.total[0]


class LastDrawn(Scaling):
    """What it draws belongs to the class: the last one built has drawn for all of them."""

    def __init__(self, channels, length, h):
        super().__init__(channels, length, h)
        LastDrawn.shift = torch.randn(channels)

    def forward(self, x):
        return x * self.scale + self.shift


@functools.cache
def common_mix(channels):
    """Return the one module that all callers get."""
    return nn.Linear(channels, channels)


class SharedModule(nn.Module):
    """All its objects hold the same module, so that each run would train the others' weights."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.mix = common_mix(channels)

    def forward(self, x):
        return x + self.mix(x)


class Shorter(Scaling):
    def forward(self, x):
        return (x * self.scale)[:, 1:]


class Narrower(Scaling):
    def forward(self, x):
        return (x * self.scale)[..., :1]


class Nothing(Scaling):
    def forward(self, x):
        return None


class Half(Scaling):
    def forward(self, x):
        return (x * self.scale).half()


class NotANumber(Scaling):
    def forward(self, x):
        return x * self.scale * float("nan")


class Unused(Scaling):
    def __init__(self, channels, length, h):
        super().__init__(channels, length, h)
        self.extra = nn.Parameter(torch.ones(1))


class Apart(Scaling):
    def forward(self, x):
        return 2 * x


class Failing(Scaling):
    def forward(self, x):
        raise KeyError("planted")


class Leaves(Scaling):
    """Ends the program, as a script's check of its arguments does."""

    def forward(self, x):
        raise SystemExit(0)


class SignsNothing(Scaling):
    """Its signature is no dict of numbers."""

    def signature(self, tokens):
        return None


class SignsAtRandom(Scaling):
    """Its signature is another one each time."""

    def signature(self, tokens):
        return {"observed_scale": torch.randn(())}


class FailsWithoutStep(Scaling):
    """Divides by h, which is 0 for the placebo."""

    def __init__(self, channels, length, h):
        super().__init__(channels, length, h)
        self.rate = 1 / h


NotALayer = 3

REFUSED = {  # what the line has to say, by one of these words
    "Dropout": "dropout",
    "LateDropout": "dropout|random|otherwise beside",
    "BatchNorm": "batch",
    "BatchMean": "batch",
    "LateBatchMean": "batch",
    "Tuple": "tuple",
    "RunningMean": "mean.*resume",
    "SpectralNorm": "_u|two answers|changes",
    "Counter": "calls.*resume",
    "HiddenCounter": "_calls.*resume",
    "TensorCounter": "calls.*resume",
    "BareCounter": "calls.*resume",
    "FrozenCounter": "calls.*resume",
    "Teacher": "teacher|two answers",
    "Single": "table.*float32",
    "ComplexSingle": "table.*complex64",
    "NoStep": r"NoStep\(channels, length, h\).* \(channels, length\)",
    "ByKeyword": r"ByKeyword\(channels, length, h\).*\*, channels, length, h",
    "NumPyRandom": "random",
    "PythonRandom": "random|otherwise beside",
    "KeptView": "view",
    "LateKeptView": "view",
    "Shared": "shared|state it keeps",
    "SharedModule": "shared",
    "LastDrawn": "shared",
    "Shorter": r"\(8, 9, 3\).*\(8, 8, 3\)",
    "Narrower": r"\(8, 9, 3\).*\(8, 9, 1\)",
    "Nothing": "NoneType",
    "Half": "float16",
    "NotANumber": "NaN",
    "Unused": "extra",
    "Apart": "depend|scale",
    "Failing": "planted",
    "Leaves": "SystemExit",
    "SignsNothing": "signature.*NoneType",
    "SignsAtRandom": "signature.*two answers",
    "FailsWithoutStep": r"h=0\.0.*ZeroDivisionError",
    "NotALayer": "NotALayer",
    "Missing": "Missing",
}
