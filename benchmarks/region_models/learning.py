"""Towers that are called several times or without gradients; autoencoders; graphs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.region_models.parts import Made, Residual, Tower, mlp, random


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return F.cosine_similarity(self.tower(one), self.tower(other), dim=-1)


class Dino(nn.Module):
    """Small crops pass the student alone, large ones the teacher too, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Tower(), Tower()
        self.head = mlp(32)

    def forward(self, large: list[Tensor], small: list[Tensor]) -> Tensor:
        with torch.no_grad():
            targets = [self.teacher(crop).mean(1).softmax(-1) for crop in large]
        found = [self.head(self.student(crop).mean(1)) for crop in (*large, *small)]
        return torch.stack([F.cross_entropy(f, t) for f in found for t in targets]).mean()


class Jepa(nn.Module):
    """Predicts what a target encoder, without gradients, makes of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.target, self.predictor = Tower(), Tower(), Tower(3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = F.layer_norm(self.target(x), (32,))
        return F.smooth_l1_loss(self.predictor(self.encoder(x[:, ::2])), target[:, ::2])


class Byol(nn.Module):
    """One tower gives the target, without gradients, and the prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.predictor = Tower(), mlp(32)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.tower(x)
        return F.mse_loss(self.predictor(self.tower(x.flip(1))), target)


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual, self.textual = Tower(), Tower(4)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        one, other = self.visual(image).mean(1), self.textual(text).mean(1)
        return F.cross_entropy(one @ other.T, torch.arange(len(one)))


class VqVae(nn.Module):
    """Two nn.Sequential, and a codebook whose nearest vectors stand in between."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 4, 2, 1), nn.ReLU(),
            *(Residual(nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(2)),
        )  # fmt: skip
        self.codes = nn.Embedding(32, width)
        self.decoder = nn.Sequential(
            *(Residual(nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(2)),
            nn.ConvTranspose2d(width, width, 4, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x).movedim(1, -1)
        nearest = torch.cdist(z.flatten(0, -2), self.codes.weight).argmin(-1)
        q = self.codes(nearest).view(z.shape)
        straight = (z + (q - z).detach()).movedim(-1, 1)
        found = self.decoder(straight)
        return F.mse_loss(found, x) + F.mse_loss(q, z.detach()) + F.mse_loss(z, q.detach())


class Vae(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.mean, self.scale = nn.Linear(width, 8), nn.Linear(width, 8)
        self.decoder = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.encoder(x)
        mean, scale = self.mean(y), self.scale(y)
        z = mean + torch.randn_like(mean) * scale.exp()
        return F.mse_loss(self.decoder(z), x) + (mean.square() + scale.exp() - scale).mean()


class Sage(nn.Module):
    """GraphSAGE's: means over neighbours, beside the node itself."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.lin_l, self.lin_r = nn.Linear(before, width), nn.Linear(before, width, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        summed = torch.zeros_like(x).index_add(0, target, x[source])
        count = torch.zeros(len(x)).index_add(0, target, torch.ones(len(target)))
        out: Tensor = self.lin_l(summed / count.clamp(min=1)[:, None]) + self.lin_r(x)
        return out


class GraphSage(nn.Module):
    """Convolutions and norms in lists of their own, with functions between."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.convs = nn.ModuleList(Sage(width, width) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(4))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for convolution, norm in zip(self.convs, self.norms, strict=True):
            x = F.dropout(F.relu(norm(convolution(x, edges))), 0.5, self.training)
        return x


class Gat(nn.Module):
    """Attention over edges, layer after layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_EdgeAttention(width) for _ in range(4))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, edges)
        return x


class _EdgeAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin, self.score, self.out = nn.Linear(width, width), mlp(2 * width, 1), mlp(width)
        self.last = nn.Linear(2 * width, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        y = self.lin(x)
        pairs = torch.cat([y[source], y[target]], -1)
        weight = torch.sigmoid(self.last(self.score(pairs)))
        out: Tensor = self.out(torch.zeros_like(y).index_add(0, target, weight * y[source]))
        return out


class Ebm(nn.Module):
    """A generator, and a critic that sees what is real and what is made."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = Tower(4), Tower(4)

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        made = self.generator(noise)
        return self.critic(made).mean() - self.critic(real).mean()


class Dlrm(nn.Module):
    """Tables, a bottom and a top MLP with products between (recommendation)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 16) for _ in range(6))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear(37, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        rows = torch.stack(
            [self.bottom(dense), *(t(sparse[:, n]) for n, t in enumerate(self.tables))], 1
        )
        one, other = torch.triu_indices(7, 7, 1)
        products = (rows @ rows.mT)[:, one, other]
        out: Tensor = self.top(torch.cat([rows[:, 0], products], 1))
        return out


def _edges() -> Tensor:
    return torch.randint(0, 64, (2, 256), generator=torch.Generator().manual_seed(2))


def _crops() -> Any:
    return [random(2, 32, 32) for _ in range(2)], [random(2, 12, 32) for _ in range(4)]


MODELS: dict[str, Made] = {
    "siamese": lambda: (Siamese(), (random(2, 32, 32), random(2, 32, 32))),
    "DINO crops": lambda: (Dino(), _crops()),
    "JEPA": lambda: (Jepa(), (random(2, 32, 32),)),
    "BYOL, one tower": lambda: (Byol(), (random(2, 32, 32),)),
    "CLIP's two towers": lambda: (Clip(), (random(4, 32, 32), random(4, 16, 32))),
    "VQ-VAE of two Sequentials": lambda: (VqVae(), (random(2, 3, 32, 32),)),
    "VAE": lambda: (Vae(), (random(64, 64),)),
    "GraphSAGE": lambda: (GraphSage(), (random(64, 32), _edges())),
    "graph attention": lambda: (Gat(), (random(64, 32), _edges())),
    "generator and critic": lambda: (Ebm(), (random(2, 32, 32), random(2, 32, 32))),
    "DLRM": lambda: (Dlrm(), (random(64, 13), torch.randint(0, 50, (64, 6)))),
}
