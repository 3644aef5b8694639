"""t2r teach"""

from typing import Annotated

from t2r.cli.common import (
    AsJson,
    Device,
    Model,
    Out,
    Quiet,
    Revision,
    TrustRemoteCode,
    calm,
    flag,
    is_first_process,
    print_json,
    shows_progress,
)
from t2r.options import Conversion, RunOptions, TeachingOptions, options_of

OPTIONS, TEXTS = options_of(TeachingOptions), options_of(Conversion)


def teach(
    model: Model,
    out: Out,
    train: Annotated[
        list[str],
        flag(TEXTS["train"], help="A file, a glob, JSONL or datasets:NAME, as for convert. Repeatable.", default=""),
    ],
    top_k: Annotated[int, flag(OPTIONS["top_k"])] = TeachingOptions.top_k,
    block_size: Annotated[int | None, flag(OPTIONS["block_size"])] = None,
    documents: Annotated[bool, flag(TEXTS["documents"])] = False,
    temperature: Annotated[float, flag(OPTIONS["temperature"])] = TeachingOptions.temperature,
    device: Device = RunOptions.device,
    bf16: Annotated[bool | None, flag(TEXTS["bf16"], help="Compute in bfloat16.")] = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Write a teacher's distribution of a text to disk, so that conversions need not run the teacher.

    Of each position, the folder has the most likely tokens with their probabilities, and the probability of all others
    together. t2r convert --teacher-logits reads it in its distillations, as often as you like.

    \b
    t2r teach gpt2 logits --train corpus.txt                            64 tokens of each position
    t2r convert gpt2 rnn --train corpus.txt --teacher-logits logits
    torchrun --nproc_per_node 8 -m t2r teach gpt2 logits --train corpus.txt    on eight GPUs

    An interrupted command is continued by the same command. Several processes may run the same command at the same
    time, on one machine or on several with a shared folder: each takes the next part of the text that no other works
    on.
    """
    from t2r.pipelines.teach import summary
    from t2r.pipelines.teach import teach as run

    with calm(quiet or as_json, info=not quiet):
        results = run(
            model,
            out,
            train=train,
            top_k=top_k,
            block_size=block_size,
            documents=documents,
            temperature=temperature,
            device=device,
            bf16=bf16,
            revision=revision,
            trust_remote_code=trust_remote_code,
            progress=shows_progress(quiet or as_json),
        )
    if not is_first_process():
        return
    if as_json:
        print_json(results)
    elif not quiet:
        print(*summary(results), sep="\n")
