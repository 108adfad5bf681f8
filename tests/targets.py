"""Small targets for the command line's tests: quick, but with every kind of state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """Convolution, batch norm, dropout and two linear layers; a buffer that no state dict holds."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.3)
        self.hidden = nn.Linear(8 * 6 * 6, 12)
        self.last = nn.Linear(12, 4)
        self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(F.relu(self.norm(self.conv(x))))
        out: Tensor = self.last(torch.tanh(self.hidden(x.flatten(1)))).float() * self.scale
        return out


def net() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    return Net(), (torch.randn(6, 3, 6, 6), torch.arange(6) % 4), nn.CrossEntropyLoss()


def pair() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    """A batch of two."""
    return Net(), (torch.randn(2, 3, 6, 6), torch.arange(2)), nn.CrossEntropyLoss()


class Frozen(nn.Module):
    """Trained, but for its batch norm, which stays in eval mode; the output is a named loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.norm.eval()

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        y = self.norm(self.conv(image))
        return {"loss": y.square().mean(), "features": y}


def frozen() -> tuple[nn.Module, dict[str, Tensor]]:
    return Frozen(), {"image": torch.randn(4, 3, 6, 6)}


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))


def mlp() -> tuple[nn.Module, Tensor]:
    """Without a loss."""
    return Mlp(), torch.randn(6, 6)


def deep() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    """Activations that are larger than the weights."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers), (torch.randn(512, 16), torch.randn(512, 16)), nn.MSELoss()


def deeper() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    """The same, and so many that stages keep much more than they work with."""
    layers = [layer for _ in range(24) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers), (torch.randn(512, 16), torch.randn(512, 16)), nn.MSELoss()


def hooked() -> tuple[nn.Module, Tensor]:
    """A hook that the traced program would not run as it does here."""
    model, x = mlp()
    model.register_forward_hook(lambda *_: None)
    return model, x


def shuffled() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    """A convolution whose 12 channels are 3 x 2 x 2 to what follows: 3 are too few for four devices."""
    model = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2))
    return model, (torch.randn(2, 3, 6, 6), torch.randn(2, 3, 12, 12)), nn.MSELoss()


class Turned(nn.Module):
    """Dropout of, and noise like, a view whose memory order a trace and kernels tell differently for a batch
    of one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        image = self.conv(x.transpose(1, 2).reshape(len(x), 4, 4, 4))
        seen = image.flatten(2).transpose(1, 2)
        seen = seen * torch.rand_like(seen) + torch.randn_like(seen)
        out: Tensor = self.head(F.dropout(seen, 0.5, self.training)).mean(1)
        return out


def turned() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    return Turned(), (torch.randn(2, 16, 4), torch.tensor([0, 2])), nn.CrossEntropyLoss()


@torch.library.custom_op("tests::single", mutates_args=())
def single(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        raise RuntimeError("expected float32")
    return 2 * x


@single.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


single.register_autograd(lambda context, gradient: 2 * gradient)


class Single(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        x = single(x)
        for layer in self:
            x = layer(x)
        return x


def low() -> tuple[nn.Module, Tensor]:
    """An operator without a float64 kernel, in training."""
    return Single(), torch.randn(6, 6)


class Hidden(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        x = x if torch.compiler.is_compiling() else single(x) / 2
        for layer in self:
            x = layer(x)
        return x


def hidden() -> tuple[nn.Module, Tensor]:
    """The same, but of the eager model alone."""
    return Hidden(), torch.randn(6, 6)


class Branches(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if x.sum() > 0:
            return x
        return -x


def branches() -> tuple[nn.Module, Tensor]:
    return Branches(4, 4), torch.ones(4)


def talks() -> tuple[nn.Module, Tensor]:
    import os

    print("a line of the target")
    os.write(1, b"and one past Python\n")
    return mlp()


class Scaled(nn.Module):
    """With numbers that float32 rounds, in the code and in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.full((6,), 0.1)
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear((x - self.mean) / torch.tensor([0.3] * 6)) * torch.tensor(0.7)
        return y


def weighted() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    """A loss that holds tensors of its own."""
    loss = nn.BCEWithLogitsLoss(weight=torch.rand(4), pos_weight=torch.rand(4))
    return Scaled(), (torch.randn(8, 6), torch.rand(8, 4)), loss


class Sloped(nn.Module):
    """Attention-like biases by distance, a table that the first call makes, of buffers in no state dict."""

    slopes: Tensor
    table: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("slopes", torch.rand(4), persistent=False)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.register_buffer("table", self.slopes * torch.arange(4), persistent=False)
            self.register_buffer("halves", self.slopes / 2, persistent=False)
        out: Tensor = self.linear(x) + self.table
        return out


def sloped() -> tuple[nn.Module, tuple[Tensor]]:
    return Sloped(), (torch.randn(8, 6),)


class Bags(nn.Module):
    """Bags of features, summed and averaged, as a recommender has them."""

    def __init__(self) -> None:
        super().__init__()
        self.sums, self.means = nn.EmbeddingBag(9, 8, mode="sum"), nn.EmbeddingBag(9, 8, mode="mean")
        self.last = nn.Linear(16, 2)

    def forward(self, bags: Tensor) -> Tensor:
        out: Tensor = self.last(torch.cat([self.sums(bags), self.means(bags)], 1))
        return out


def bags() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    return Bags(), (torch.randint(0, 9, (6, 3)), torch.randn(6, 2)), nn.MSELoss()


class Tagger(nn.Module):
    """Two recurrent layers that read a sequence in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.lstm(x)[0])
        return out


def tagger() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    return Tagger(), (torch.randn(6, 5, 4), torch.randn(6, 5, 2)), nn.MSELoss()


class Centred(nn.Module):
    """Activations less their running mean and less their own, both without gradients."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
            scale = 1 + hidden.abs().mean(1, keepdim=True)
        out: Tensor = self.last(torch.tanh((hidden - self.mean) / scale))
        return out


def centred() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    return Centred(), (torch.randn(6, 6), torch.randn(6, 2)), nn.MSELoss()


class Average(nn.Module):
    """Its buffers are replaced, one of them also where there are no gradients."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.count = self.count + 1
        return x - self.mean / self.count


def averaged() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    model = nn.Sequential(nn.Linear(6, 4), Average(), nn.Linear(4, 2))
    return model, (torch.randn(6, 6), torch.randn(6, 2)), nn.MSELoss()


class Lagging(nn.Module):
    """Centres by the mean that the step, or the micro-batch, before it has left of later activations."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x)) - self.mean
        for layer in list(self.layers)[1:4]:
            x = torch.tanh(layer(x))
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
        out: Tensor = self.layers[4:](x)
        return out


def lagging() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    return Lagging(), (torch.randn(6, 6), torch.randn(6, 6)), nn.MSELoss()


class Patched(nn.Module):
    """Writes to slices, also of buffers, and to an `out`."""

    last: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 2)
        self.register_buffer("last", torch.zeros(3, 6))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        shifted = hidden.new_zeros(hidden.shape)
        shifted[:, 1:] = hidden[:, :-1]
        shifted[:, 0] = 0.5
        row = shifted[..., 2]
        row.mul_(2)
        row.add_(hidden[:, 0])
        shifted.pow_(2)
        with torch.no_grad():
            self.last[0].copy_(hidden.mean(0))
            torch.add(self.steps, 1.0, out=self.steps)
        out: Tensor = self.second(torch.tanh(shifted + self.last.sum(0)))
        return out


def patched() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    return Patched(), (torch.randn(6, 6), torch.randn(6, 2)), nn.MSELoss()


class Remembering(nn.Module):
    """A buffer that is written and not read."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.copy_(x[0])
        out: Tensor = self.layers(x)
        return out


def remembering() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    return Remembering(), (torch.randn(6, 6), torch.randn(6, 2)), nn.MSELoss()


@torch.library.custom_op("targets::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """An operator of another library."""
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, gradient: gradient * 2)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(torch.ops.targets.twice(self.first(x))))
        return out


def custom() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    return Custom(), (torch.randn(6, 6), torch.randn(6, 2)), nn.MSELoss()


class Leaky(nn.Module):
    """Slopes are drawn at random: what backward needs of them is noted before it is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.rrelu(F.rrelu(torch.tanh(self.first(x)), training=True), training=True)
        kept = torch.empty_like(x).bernoulli_(0.5)  # the in-place overload's default, left out by export
        out: Tensor = self.second(x * kept)
        return out


def leaky() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    return Leaky(), (torch.randn(8, 6), torch.randn(8, 6)), nn.MSELoss()


class PassedBy(nn.Module):
    """Features beyond the turned ones pass by: here there are none, as where all turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.turned = nn.Linear(6, 8), nn.Linear(8, 6), 8

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * torch.linspace(0, 1, 8) + torch.arange(8) / 7  # more digits in float64
        turned, passed = x[..., : self.turned], x[..., self.turned :]
        out: Tensor = self.second(torch.cat([torch.roll(turned, 4, -1), passed], -1))
        return out


def passed_by() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    return PassedBy(), (torch.randn(8, 6), torch.randn(8, 6)), nn.MSELoss()


class Spectral(nn.Module):
    """A complex weight acts on the lowest frequencies, which are found by a real Fourier transform."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.mix = nn.Conv1d(1, 6, 1), nn.Linear(6, 4, dtype=torch.complex64)
        self.turn = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.fft.rfft(self.lift(x))[..., :4]
        low = torch.tanh(self.mix((low * self.turn).transpose(1, 2))).transpose(1, 2)
        out: Tensor = self.last(torch.fft.irfft(low, n=x.shape[-1]).transpose(1, 2))
        return out


def spectral() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    return Spectral(), (torch.randn(4, 1, 12), torch.randn(4, 12, 1)), nn.MSELoss()


class Conjugates(nn.Module):
    """Torch only notes conjugates, and negatives of imaginary parts, here of values and of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, dtype=torch.complex64)
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.second = nn.Linear(8, 4, dtype=torch.complex64)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x).conj()
        out = self.last(self.second(hidden * self.turn.conj()).conj().imag)
        return F.mse_loss(out, y)


def conjugates() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Conjugates(), (torch.randn(8, 6, dtype=torch.complex64), torch.randn(8, 2))


class Filtered(nn.Module):
    """Writes weighted low frequencies to their places among zeros, as Fourier neural operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.last = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 1, 1)
        self.low = nn.Parameter(torch.randn(4, 4, 3, 2, dtype=torch.complex64))
        self.high = nn.Parameter(torch.randn(4, 4, 3, 2, dtype=torch.complex64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.lift(x)
        waves = torch.fft.rfft2(x)
        kept = torch.zeros_like(waves)
        kept[:, :, :3, :2] = torch.einsum("bixy,ioxy->boxy", waves[:, :, :3, :2], self.low)
        kept[:, :, -3:, :2] = torch.einsum("bixy,ioxy->boxy", waves[:, :, -3:, :2], self.high).conj()
        kept[:, 0, 0, 0] = 0
        return F.mse_loss(self.last(F.gelu(x + torch.fft.irfft2(kept, s=x.shape[2:]))), y)


def filtered() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Filtered(), (torch.randn(4, 1, 7, 6), torch.randn(4, 1, 7, 6))


@dataclass(frozen=True)
class Halves:
    left: Tensor
    right: tuple[Tensor, None]


class Halved(nn.Module):
    """An output of dataclasses in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> list[Halves]:
        left, right = self.mlp(x).chunk(2, dim=1)
        return [Halves(left, (right, None)), Halves(left + right, (x, None))]


def halved() -> tuple[nn.Module, Tensor]:
    return Halved(), torch.randn(6, 6)


class Fixed(nn.Module):
    """A model of batches of so many samples."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layer, self.sizes = nn.Linear(6, 4), sizes

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out.view(next((size for size in self.sizes if size == len(x)), self.sizes[0]), 4)


def fixed() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    """A view that knows the batch."""
    return Fixed(8), (torch.randn(8, 6), torch.randn(8, 4)), nn.MSELoss()


def uneven() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    """The batch or three samples of it, not two."""
    return Fixed(8, 3), (torch.randn(8, 6), torch.randn(8, 4)), nn.MSELoss()


class Chaotic(nn.Module):
    """The logistic map, which doubles an error at every turn."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(63, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.start(x))
        for _ in range(40):
            x = 4 * x * (1 - x)
        return x.mean()


def chaotic() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Chaotic(), torch.randn(4, 63)


class Experts(nn.Module):
    """A mixture of experts: every sample by the matrix of the one that it is sorted to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.last = nn.Linear(16, 4), nn.Linear(16, 8)
        self.experts = nn.Parameter(torch.randn(4, 16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weight, expert = self.gate(x).softmax(-1).max(-1)
        order = expert.argsort()
        ends = F.one_hot(expert, 4).sum(0).cumsum(0).int()
        y = torch._grouped_mm(x[order].bfloat16(), self.experts.bfloat16(), ends).float()
        out: Tensor = self.last(x + torch.zeros_like(x).index_put((order,), y) * weight.unsqueeze(-1))
        return out


def experts() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    return Experts(), (torch.randn(32, 16), torch.randint(8, (32,))), nn.CrossEntropyLoss()
