"""Stage 2: train the small AutoencoderKL (16 latent channels, 8x downsampling, as FLUX uses) on the emoji images.

Loss: L1 + L1 of image gradients + L1 at two coarser scales + a small KL term. The KL weight is much larger than in
latent-diffusion practice: it keeps the latent space smooth and the decoder tolerant of small latent errors, which is
what a tiny diffusion transformer needs. Most steps run on 64x64 crops (cheap); the last ones on whole images, so that
group-norm statistics and the mid-block attention see what they will see in use.

    python train_vae.py                 # from scratch
    python train_vae.py --resume        # continue from checkpoints/vae.pt
    python train_vae.py --resume --decoder-only --full 1 --lr 1e-3 --minutes 8
                                        # last polish: only the decoder, on whole images and noisy latents; the
                                        # latent space, and so the transformer trained on it, stays as it is
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL

from parallel import agree, average, launch

HERE = Path(__file__).parent
VAE_CONFIG = dict(
    in_channels=3,
    out_channels=3,
    latent_channels=16,
    layers_per_block=1,
    norm_num_groups=8,
    block_out_channels=(16, 32, 64, 64),
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    use_quant_conv=False,
    use_post_quant_conv=False,
    sample_size=128,
    scaling_factor=1.0,
    shift_factor=0.0,
    force_upcast=False,
)


def grad_l1(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """L1 distance of the horizontal and vertical finite differences."""
    d = a - b
    return (d[..., 1:] - d[..., :-1]).abs().mean() + (d[..., 1:, :] - d[..., :-1, :]).abs().mean()


def recon_loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = F.l1_loss(out, target) + 0.5 * grad_l1(out, target)
    for scale in (2, 4):
        loss = loss + 0.5 * F.l1_loss(F.avg_pool2d(out, scale), F.avg_pool2d(target, scale))
    return loss


def batch_of(images: np.ndarray, size: int, count: int, rng: np.random.Generator) -> torch.Tensor:
    """Random images, mirrored at random, cropped to ``size``, as float in [-1, 1]."""
    out = np.empty((count, size, size, 3), np.uint8)
    for k, i in enumerate(rng.integers(len(images), size=count)):
        y, x = rng.integers(0, images.shape[1] - size + 1, size=2)
        crop = images[i, y : y + size, x : x + size]
        out[k] = crop[:, ::-1] if rng.random() < 0.5 else crop
    return torch.from_numpy(out).permute(0, 3, 1, 2).float().div_(127.5).sub_(1).contiguous()


@torch.no_grad()
def psnr(vae: AutoencoderKL, images: np.ndarray) -> tuple[float, float]:
    """(mean of per-image PSNR, PSNR of the mean error) of encode-mode-decode in fp32 over ``images``."""
    mse = []
    for s in range(0, len(images), 32):
        x = torch.from_numpy(images[s : s + 32]).permute(0, 3, 1, 2).float() / 127.5 - 1
        y = vae.decode(vae.encode(x).latent_dist.mode()).sample.clamp(-1, 1)
        mse.append(((y - x) / 2).square().mean((1, 2, 3)))
    mse = torch.cat(mse)
    return (-10 * mse.log10()).mean().item(), (-10 * mse.mean().log10()).item()


def train(rank: int, world: int, args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)  # the same weights everywhere
    args.out.mkdir(parents=True, exist_ok=True)
    images = np.load(args.data / "images.npy")
    vae = AutoencoderKL(**VAE_CONFIG)
    trained = list(vae.decoder.parameters() if args.decoder_only else vae.parameters())
    optimizer = torch.optim.AdamW(trained, lr=args.lr, betas=(0.9, 0.99), weight_decay=1e-4)
    step = 0
    if args.resume:
        state = torch.load(args.out / "vae.pt", weights_only=True)
        vae.load_state_dict(state["model"])
        if len(state["optimizer"]["param_groups"][0]["params"]) == len(trained):
            optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    rng = np.random.default_rng(args.seed + step + 7777 * rank)
    torch.manual_seed(args.seed + step + 7777 * rank)
    log = print if rank == 0 else (lambda *a, **k: None)
    log(f"VAE {sum(p.numel() for p in vae.parameters()) / 1e6:.2f} M parameters, {len(images)} images", flush=True)

    def save(step: int) -> None:
        torch.save({"model": vae.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, args.out / "vae.pt")

    began, first, sums = time.time(), step, np.zeros(2)
    while (done := agree((time.time() - began) / (60 * args.minutes), world)) < 1:
        lr = float(args.lr * min(1, (step - first + 1) / 100) * (0.03 + 0.97 * 0.5 * (1 + np.cos(np.pi * done))))
        for group in optimizer.param_groups:
            group["lr"] = lr
        size, count = (64, 32 // world) if done < 1 - args.full else (128, 12 // world)
        x = batch_of(images, size, count, rng)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.set_grad_enabled(not args.decoder_only):
                posterior = vae.encode(x).latent_dist
            if args.decoder_only:
                std = args.noise * torch.rand(len(x), 1, 1, 1) * posterior.mean.float().std()
            else:
                std = posterior.std.float()
            z = posterior.mean.float() + std * torch.randn(posterior.mean.shape)
            out = vae.decode(z).sample
        mean, logvar = posterior.mean.float(), posterior.logvar.float()
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        rec = recon_loss(out.float(), x)
        loss = rec + args.kl * min(1.0, step / 300) * kl
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        average([p.grad for p in trained], world)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        step += 1
        sums += (rec.item(), kl.item())
        if step % 100 == 0:
            log(
                f"step {step} ({size} px) rec {sums[0] / 100:.4f} kl {sums[1] / 100:.3f} lr {lr:.2e} "
                f"{time.time() - began:.0f}s",
                flush=True,
            )
            sums[:] = 0
        if step % 500 == 0:
            if rank == 0:
                of_images, of_error = psnr(vae, images[::48])
                print(f"PSNR {of_images:.2f} dB (mean of images), {of_error:.2f} dB (mean error)", flush=True)
                save(step)
    if rank == 0:
        save(step)
        of_images, of_error = psnr(vae, images)
        print(f"final PSNR over all images: {of_images:.2f} / {of_error:.2f} dB", flush=True)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--data", type=Path, default=HERE / "data")
    ap.add_argument("--out", type=Path, default=HERE / "checkpoints")
    ap.add_argument("--minutes", type=float, default=20)
    ap.add_argument("--full", type=float, default=0.3, help="part of the time, at the end, on whole images")
    ap.add_argument("--lr", type=float, default=1.5e-3)
    ap.add_argument("--kl", type=float, default=5e-4, help="weight of the mean KL per latent value")
    ap.add_argument("--decoder-only", action="store_true")
    ap.add_argument("--noise", type=float, default=0.25, help="with --decoder-only: most noise, in latent deviations")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--resume", action="store_true")
    ap.add_argument("--processes", type=int, default=os.cpu_count())
    args = ap.parse_args()
    launch(args.processes, train, args)


if __name__ == "__main__":
    main()
