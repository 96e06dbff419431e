"""Stage 3: train the transformer and both text encoders together on cached latents (rectified flow).

    python train_dit.py --minutes 80               # from scratch, learning rate decays over the last part
    python train_dit.py --minutes 60 --resume      # continue from checkpoints/dit.pt (--device cuda: on a GPU)

One step: take images of a shuffled epoch (mirrored at random where harmless), draw a caption each (10 % empty), noise
the latents at stratified logit-normal times, and regress the velocity ``noise - latents``. The hidden matrices are
optimised with Muon, all else with AdamW; weights are bf16 with fp32 masters; an exponential average is kept.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxPipeline
from transformers import CLIPTokenizer, T5TokenizerFast

from fast_flux import FastFlux, rope_table
from model import TextToLatent, count
from parallel import agree, average, launch
from text import build_tokenizers, caption
from train_vae import VAE_CONFIG

HERE = Path(__file__).parent


@torch.no_grad()
def cache_latents(images: np.ndarray, vae_file: Path, target: Path, rank: int, world: int) -> dict:
    """Posterior means of all images and their mirror images, packed as FLUX packs them, and their scale and shift."""
    if agree(float(target.exists()), world):
        return torch.load(target, weights_only=True)
    vae = AutoencoderKL(**VAE_CONFIG).eval()
    vae.load_state_dict(torch.load(vae_file, weights_only=True)["model"])
    latents = torch.zeros(len(images), 2, 16, 16, 16)
    for s in range(32 * rank, len(images), 32 * world):  # each process encodes its share
        x = torch.from_numpy(images[s : s + 32]).permute(0, 3, 1, 2).float() / 127.5 - 1
        for mirrored in (0, 1):
            latents[s : s + 32, mirrored] = vae.encode(x.flip(-1) if mirrored else x).latent_dist.mode() * world
    average([latents], world)
    shift, scale = latents.mean().item(), 1 / latents.std().item()
    n, _, c, h, w = latents.shape
    flat = ((latents - shift) * scale).reshape(n * 2, c, h, w)
    packed = FluxPipeline._pack_latents(flat, n * 2, c, h, w).reshape(n, 2, h * w // 4, c * 4)
    out = {"latents": packed.contiguous(), "scale": scale, "shift": shift}
    if rank == 0:
        torch.save(out, target)
    return out


class Optimizer:
    """Muon for 2-D weights inside blocks, AdamW for the rest; fp32 masters, bf16 model weights, EMA of the masters."""

    def __init__(self, model: torch.nn.Module, muon_lr: float, adam_lr: float, ema: float, rank=0, world=1):
        self.rank, self.world = rank, world
        self.muon_lr, self.adam_lr, self.ema_decay, self.steps = muon_lr, adam_lr, ema, 0
        self.params = dict(model.named_parameters())
        self.master = {n: p.detach().float().clone() for n, p in self.params.items()}
        self.ema = {n: p.clone() for n, p in self.master.items()}
        hidden = [n for n, p in self.params.items() if p.ndim == 2 and self.is_hidden(n)]
        self.groups: dict[tuple, list[str]] = {}
        for n in hidden:
            self.groups.setdefault(tuple(self.params[n].shape), []).append(n)
        self.momentum = {n: torch.zeros_like(self.master[n]) for n in hidden}
        self.rest = [n for n in self.params if n not in self.momentum]
        self.m1 = {n: torch.zeros_like(self.master[n]) for n in self.rest}
        self.m2 = {n: torch.zeros_like(self.master[n]) for n in self.rest}

    @staticmethod
    def is_hidden(name: str) -> bool:
        # not the text encoders: without q/k norms, Muon's steps saturate their attention and all prompts look alike
        return "transformer_blocks" in name and "norm" not in name

    @staticmethod
    def orthogonalise(g: torch.Tensor) -> torch.Tensor:
        """Newton-Schulz iterations on a stack of matrices."""
        x = g.bfloat16()
        x = x / (x.flatten(1).float().norm(dim=1)[:, None, None].to(x.dtype) + 1e-7)
        tall = x.shape[1] > x.shape[2]
        if tall:
            x = x.mT.contiguous()
        for a, b, c in ((3.4445, -4.7750, 2.0315),) * 5:
            s = x @ x.mT
            x = a * x + (b * s + c * (s @ s)) @ x
        return x.mT if tall else x

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update from the gradients in the parameters; each process orthogonalises its share of the matrices."""
        self.steps += 1
        average([p.grad for p in self.params.values()], self.world)
        lr = self.muon_lr * scale
        owned, other = [], []
        for shape, names in self.groups.items():
            update = torch.zeros(len(names), *shape, dtype=torch.bfloat16, device=self.params[names[0]].device)
            mine = []
            for i, n in enumerate(names):
                grad = self.params[n].grad.float()
                self.momentum[n].lerp_(grad, 0.05)
                if i % self.world == self.rank:
                    mine.append(grad.lerp_(self.momentum[n], 0.95))
            if mine:
                update[self.rank :: self.world] = (
                    self.orthogonalise(torch.stack(mine)) * self.world
                )  # summed below, then divided
            owned.append(update)
            other.append((shape, names))
        average(owned, self.world)
        for update, (shape, names) in zip(owned, other, strict=True):
            size = max(1, shape[0] / shape[1]) ** 0.5
            for n, u in zip(names, update, strict=True):
                self.master[n].mul_(1 - lr * 0.01).add_(u, alpha=-lr * size)
        names = self.rest
        b1, b2 = 0.9, 0.98
        grads = [self.params[n].grad.float() for n in names]
        m1, m2 = [self.m1[n] for n in names], [self.m2[n] for n in names]
        torch._foreach_lerp_(m1, grads, 1 - b1)
        torch._foreach_mul_(m2, b2)
        torch._foreach_addcmul_(m2, grads, grads, 1 - b2)
        c1, c2 = 1 - b1**self.steps, 1 - b2**self.steps
        for n, a, b in zip(names, m1, m2, strict=True):
            # embedding tables see each row rarely: a higher rate; the rest of the text encoders: a lower one
            table = "token_embedding" in n or "shared" in n
            lr = self.adam_lr * scale * (2 if table else 0.2 if "text_encoder" in n else 1)
            self.master[n].addcdiv_(a, (b / c2).sqrt_().add_(1e-8), value=-lr / c1)
        if self.steps % 4 == 0 and self.rank == 0:
            decay = min(self.ema_decay, self.steps / (self.steps + 100)) ** 4
            torch._foreach_lerp_(list(self.ema.values()), list(self.master.values()), 1 - decay)
        for n, p in self.params.items():
            p.copy_(self.master[n])
            p.grad = None

    def state_dict(self) -> dict:
        """Masters in fp32, the averages and moments in bf16: resumable and small."""
        half = lambda d: {n: t.bfloat16().cpu() for n, t in d.items()}  # noqa: E731
        return {
            "master": {n: t.cpu() for n, t in self.master.items()},
            "ema": half(self.ema),
            "momentum": half(self.momentum),
            "m1": half(self.m1),
            "m2": half(self.m2),
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict) -> None:
        self.steps = state["steps"]
        for kind in ("master", "ema", "momentum", "m1", "m2"):
            for n, t in getattr(self, kind).items():
                t.copy_(state[kind][n])
        with torch.no_grad():
            for n, p in self.params.items():
                p.copy_(self.master[n])


class Captions:
    """Pre-drawn captions of every image as token ids; the last row is the empty caption."""

    def __init__(self, records, folder: Path, length: int, style: float, per_image: int = 64, seed: int = 0):
        rng = random.Random(seed)
        texts = [caption(r, rng, style) for r in records for _ in range(per_image)] + [""]
        t5, clip = (
            T5TokenizerFast.from_pretrained(folder / "tokenizer_2"),
            CLIPTokenizer.from_pretrained(folder / "tokenizer"),
        )
        kwargs = dict(padding="max_length", truncation=True, return_tensors="pt", max_length=length)
        self.t5, self.clip, self.per_image = t5(texts, **kwargs).input_ids, clip(texts, **kwargs).input_ids, per_image

    def draw(self, images: torch.Tensor, dropout: float) -> tuple[torch.Tensor, torch.Tensor]:
        rows = images * self.per_image + torch.randint(self.per_image, images.shape)
        rows[torch.rand(images.shape) < dropout] = -1
        return self.t5[rows], self.clip[rows]


def times(count: int, focus: float) -> torch.Tensor:
    """Stratified times in [0, 1]: mostly logit-normal, the rest uniform.

    While ``focus`` is near 1 (the main part of training) late times are favoured: there the picture has to come from
    the text, which is by far the slowest thing to learn. As it falls to 0, with the learning rate, times even out.
    """
    u = (torch.randperm(count) + torch.rand(count)) / count
    normal = torch.sigmoid(torch.special.ndtri(u.clamp(1e-4, 1 - 1e-4)) + 0.4 + 0.8 * focus)
    return torch.where(torch.rand(count) < 0.3 - 0.15 * focus, u, normal)


def train(rank: int, world: int, args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)  # the same weights everywhere
    device = torch.device(args.device)
    rows = [json.loads(line) for line in (args.data / "meta.jsonl").read_text().splitlines()]
    names = set(args.names.read_text().splitlines()) if args.names else None
    used = torch.tensor(
        [i for i, r in enumerate(rows) if r["style"] in args.styles and (names is None or r["name"] in names)]
    )
    records = [rows[i] for i in used]
    if rank == 0 and not (args.out / "tokenizer_2").is_dir():
        build_tokenizers(rows, args.out)
    cache = cache_latents(np.load(args.data / "images.npy"), args.out / "vae.pt", args.data / "latents.pt", rank, world)
    latents, can_flip = cache["latents"][used], torch.tensor([r["flip"] for r in records])
    captions = Captions(records, args.out, 32, 0.5 if len(args.styles) > 1 else 0.2, seed=args.seed)

    model = TextToLatent().to(device)
    opt = Optimizer(model, args.muon_lr, args.adam_lr, args.ema, rank, world)
    model.bfloat16()
    seen = 0
    if args.resume:
        state = torch.load(args.out / "dit.pt", weights_only=True, map_location=device)
        opt.load_state_dict(state["optimizer"])
        seen = state["seen"]
    shuffle = torch.Generator().manual_seed(args.seed + opt.steps)  # the same order everywhere, shared out by rank
    torch.manual_seed(args.seed + opt.steps + 7777 * (rank + 1))
    grid = torch.stack(torch.meshgrid(torch.zeros(1), torch.arange(8.0), torch.arange(8.0), indexing="ij"), -1)
    grid = grid.reshape(64, 3).to(device)
    ropes = {n: rope_table(model.transformer, torch.cat([grid.new_zeros(n, 3), grid])) for n in (16, 32)}
    flux = FastFlux(model.transformer)
    local = args.batch // world
    log = print if rank == 0 else (lambda *a, **k: None)
    log(" ".join(f"{n} {count(p):.2f}M" for n, p in model.named_children()), f"images {len(records)}", flush=True)

    def save() -> None:
        tmp = args.out / "dit.tmp"
        torch.save({"optimizer": opt.state_dict(), "seen": seen, "scale": cache["scale"], "shift": cache["shift"]}, tmp)
        tmp.replace(args.out / "dit.pt")

    began = last_save = time.time()
    order, sums, counts = torch.empty(0, dtype=torch.long), np.zeros(5), np.zeros(5)
    budget, first = args.minutes * 60, opt.steps
    while True:
        elapsed = agree(time.time() - began, world)
        if elapsed > budget:
            break
        scale = min(1.0, (opt.steps - first + 1) / 60, max(0.02, (1 - elapsed / budget) / args.decay))
        if len(order) < args.batch:
            order = torch.cat([order, torch.randperm(len(records), generator=shuffle)])
        images, order = order[: args.batch][rank::world], order[args.batch :]
        mirrored = (torch.rand(local) < args.mirror) & can_flip[images]
        clean = latents[images, mirrored.long()].to(device)
        t5_ids, clip_ids = captions.draw(images, 0.1)
        n = 32 if opt.steps % 8 == 0 else 16
        t = times(local, min(1.0, (1 - elapsed / budget) / args.decay)).to(device)
        noise = torch.randn_like(clean)
        noisy = torch.lerp(clean, noise, t[:, None, None])
        context = model.text_encoder_2(t5_ids[:, :n].to(device)).last_hidden_state
        pooled = model.text_encoder(clip_ids[:, :24].to(device)).pooler_output
        out = flux(noisy.bfloat16(), context, pooled, t, ropes[n])
        error = (out.float() - (noise - clean)).square().mean((1, 2))
        error.mean().backward()
        opt.step(scale)
        seen += args.batch
        bins = (t * 5).long().clamp(max=4).cpu().numpy()
        sums += np.bincount(bins, error.detach().cpu().numpy(), 5)
        counts += np.bincount(bins, minlength=5)
        if opt.steps % 50 == 0:
            log(
                f"step {opt.steps} epoch {(opt.steps - first) * args.batch / len(records):.1f} "
                f"loss {sums.sum() / counts.sum():.4f} by t "
                f"{np.round(sums / np.maximum(counts, 1), 3).tolist()} scale {scale:.2f} {elapsed:.0f}s "
                f"{(opt.steps - first) * args.batch / max(elapsed, 1):.1f}/s",
                flush=True,
            )
            sums[:] = counts[:] = 0
        if rank == 0 and time.time() - last_save > 240:
            save()
            last_save = time.time()
    if rank == 0:
        save()
    log("done", opt.steps, "steps", f"{seen} samples seen", flush=True)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--data", type=Path, default=HERE / "data")
    ap.add_argument("--out", type=Path, default=HERE / "checkpoints")
    ap.add_argument("--minutes", type=float, default=80)
    ap.add_argument("--batch", type=int, default=64, help="of all processes together")
    ap.add_argument("--styles", nargs="+", default=["flat", "noto"], help="image styles to train on")
    ap.add_argument("--names", type=Path, help="train only on the emoji named in this file, one a line")
    ap.add_argument("--mirror", type=float, default=0.1, help="chance of the mirror image, where harmless")
    ap.add_argument("--muon-lr", type=float, default=0.015)
    ap.add_argument("--adam-lr", type=float, default=1e-3)
    ap.add_argument("--decay", type=float, default=0.35, help="part of the time over which the rate falls to zero")
    ap.add_argument("--ema", type=float, default=0.995)
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--resume", action="store_true")
    ap.add_argument("--processes", type=int, default=os.cpu_count(), help="use 1 with a GPU")
    args = ap.parse_args()
    launch(args.processes, train, args)


if __name__ == "__main__":
    main()
