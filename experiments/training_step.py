"""Where the time of a training step goes, by kernel:

    python experiments/training_step.py smollm2 --like smollm2-8 --block-size 2048 [--stage distill] [--rows 30]

The step is that of `t2r bench train` with the same options: on a GPU compiled, in bfloat16, and replayed as a CUDA
graph. Kernels with the same name are added up, and shown with the share of the time of all kernels."""

from __future__ import annotations

import argparse
import copy
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile

from t2r.bench.commands import load
from t2r.bench.training import RandomText
from t2r.config import SWAP
from t2r.experiments.markup import markdown
from t2r.hub import load_config, synchronize
from t2r.model.swap import swap
from t2r.training.planning.plan import over
from t2r.training.planning.timing import stage_step
from t2r.training.recipes.recipe import default_recipe, load_recipe
from t2r.training.steps.arithmetic import fast_sums, halve
from t2r.training.steps.capture import WARM_UP
from t2r.training.steps.job import Job, Settings

STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--like", help="a converted model with windows, whose swap options are used")
    parser.add_argument("--feature-size", type=int, default=128, help="without --like")
    parser.add_argument("--stage", default="distill")
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--block-size", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=30)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction)
    given = parser.parse_args()
    (model,) = load([given.model], dtype="float32", device=given.device).values()
    how = Settings.on(model.device, compiled=given.compile, progress=False)
    recipe = load_recipe(default_recipe(False, memory=given.like is not None))
    options = {"feature_size": given.feature_size}
    if given.like is not None:
        config = load_config(given.like)
        options = {key: getattr(config, key) for key in SWAP}
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    if how.bf16:
        halve(teacher)
    student = swap(model.requires_grad_(True), **over(recipe.swap, options))
    job = Job(RandomText(model.config.get_text_config().vocab_size), teacher, how)
    stage = next(stage for stage in recipe.stages if stage.name == given.stage)
    stage = replace(stage, batch_tokens=given.batch_tokens, block_size=given.block_size)
    example = job.task.example(given.batch_tokens // given.block_size, given.block_size)
    batch = {key: x.to(student.device) for key, x in example.items()}
    on_gpu = student.device.type == "cuda"
    with fast_sums(student.device), stage_step(job, student, stage) as step:
        for _ in range(WARM_UP + 2):
            step(batch)
        synchronize(student.device)
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
            for _ in range(STEPS):
                step(batch)
            synchronize(student.device)
    kernels: dict[str, tuple[float, int]] = {}
    for event in found.key_averages():
        time = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if time > 0:
            before, count = kernels.get(event.key, (0.0, 0))
            kernels[event.key] = before + time / STEPS / 1e3, count + event.count // STEPS
    total = sum(time for time, _ in kernels.values())
    rows = [
        (name[:90], f"{time:.2f}", f"{time / total:.1%}", str(count))
        for name, (time, count) in sorted(kernels.items(), key=lambda item: -item[1][0])[: given.rows]
    ]
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"{given.model}, {stage.name}, {given.batch_tokens} tokens, {device}: {total:.1f} ms in kernels of a step")
    print(markdown(("kernel", "ms", "share", "calls"), rows))


if __name__ == "__main__":
    main()
