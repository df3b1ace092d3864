"""Preparation: its rate beside the bare tokenizer's, its memory, and a run that is killed.

    python benchmarks/bench_prepare.py [--tokenizer DIR] [--conversations 200000]

    rate      conversations/s of the bare tokenizer on the rendered text, of preparation in one
              process and in two, start-up included; tokenizer threads off
    memory    peak resident size of preparing the whole file and a quarter of it, two processes
    killed    SIGKILL in the middle, run again: shards that were kept, result byte for byte

Every arm is a process of its own. The file is generated from a seed.
"""

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORDS = (
    "the a of to in is that it was for on are as with his they at be this have from or one had by "
    "word but not what all were we when your can said there use an each which she do how their if "
    "return value function list number string error file line index token model train loss café"
).split()


def write_file(path: Path, conversations: int) -> None:
    """Short chats of two or four turns, from a seed."""
    rng = random.Random(0)
    with open(path, "w") as file:
        for _ in range(conversations):
            messages = []
            for _ in range(rng.choice((1, 1, 2))):
                for role, longest in (("user", 30), ("assistant", 40)):
                    text = " ".join(rng.choices(WORDS, k=rng.randint(5, longest)))
                    messages.append({"role": role, "content": text})
            file.write(json.dumps({"messages": messages}) + "\n")


def bare_arm(tokenizer, path: Path) -> dict:
    """The tokenizer alone, on the text that the chat template makes of the rows.

    seconds: tokenizer(texts), as everyone calls it; fastest: its Rust part without offsets.
    """
    backend = tokenizer.backend_tokenizer
    found = {"seconds": 0.0, "fastest": 0.0, "conversations": 0}

    def encode(texts: list[str]) -> None:
        for key, call in (("seconds", tokenizer), ("fastest", backend.encode_batch_fast)):
            start = time.perf_counter()
            call(texts, add_special_tokens=False)
            found[key] += time.perf_counter() - start
        found["conversations"] += len(texts)

    texts: list[str] = []
    for line in open(path):
        texts.append(tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False))
        if len(texts) == 512:
            encode(texts)
            texts = []
    if texts:
        encode(texts)
    return found


def prepare_arm(tokenizer, path: Path, cache: str, processes: int) -> dict:
    from specforge_trim.data.dataset import prepare

    start = time.perf_counter()
    data = prepare(
        path, tokenizer, cache_dir=cache, max_length=4096, processes=processes, progress=False
    )
    return {
        "seconds": time.perf_counter() - start,
        "conversations": len(data),
        "tokens": data.num_tokens,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "child_peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
        "folder": str(data.folder),
    }


def run_arm(arguments) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    path = Path(arguments.file)
    if arguments.arm == "bare":
        found = bare_arm(tokenizer, path)
    else:
        found = prepare_arm(tokenizer, path, arguments.cache, arguments.processes)
    print(json.dumps(found))


def start(arguments, arm: str, file: Path, cache: Path, processes: int) -> subprocess.Popen:
    command = [
        sys.executable, __file__, "--arm", arm, "--file", str(file), "--cache", str(cache),
        "--tokenizer", arguments.tokenizer, "--processes", str(processes),
    ]  # fmt: skip
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def measure(arguments, arm: str, file: Path, cache: Path, processes: int = 1) -> dict:
    process = start(arguments, arm, file, cache, processes)
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"arm {arm} failed with exit code {process.returncode}")
    return json.loads(out.splitlines()[-1])


def same_bytes(one: str, two: str) -> bool:
    names = sorted(p.name for p in Path(one).iterdir())
    assert names == sorted(p.name for p in Path(two).iterdir()), (one, two)
    return all((Path(one) / n).read_bytes() == (Path(two) / n).read_bytes() for n in names)


def killed_arm(arguments, file: Path, cache: Path, reference: dict, seconds: float) -> dict:
    process = start(arguments, "prepare", file, cache, 1)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = len(list(cache.glob("prepared/*.work/*.safetensors")))
    found = measure(arguments, "prepare", file, cache, 2)
    return {
        "shards kept": kept,
        "seconds of the rerun": round(found["seconds"], 1),
        "byte-identical": same_bytes(found["folder"], reference["folder"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--tokenizer", help="folder of a tokenizer; default: the embedded target's"
    )
    parser.add_argument("--conversations", type=int, default=200_000)
    parser.add_argument("--arm", choices=("bare", "prepare"), help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm is not None:
        run_arm(arguments)
        return
    if arguments.tokenizer is None:
        from specforge_trim.target.embedded import resolve_target

        arguments.tokenizer = str(
            resolve_target("smollm2-135m-instruct", cache_dir=ROOT / ".quickstart")
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, quarter = folder / "whole.jsonl", folder / "quarter.jsonl"
        write_file(whole, arguments.conversations)
        write_file(quarter, arguments.conversations // 4)
        bare = measure(arguments, "bare", quarter, folder)
        small = measure(arguments, "prepare", quarter, folder / "small", 2)
        killed = killed_arm(arguments, quarter, folder / "killed", small, small["seconds"] * 0.9)
        one = measure(arguments, "prepare", whole, folder / "one")
        two = measure(arguments, "prepare", whole, folder / "two", 2)
        rates = [arm["conversations"] / arm["seconds"] for arm in (bare, one, two)]
        same = same_bytes(one["folder"], two["folder"])
    print(f"{one['conversations']:,} conversations, {one['tokens']:,} tokens; rates per second")
    fastest = bare["conversations"] / bare["fastest"]
    print(f"tokenizer(texts)    {rates[0]:>10,.0f}")
    print(f"  its Rust part     {fastest:>10,.0f}")
    print(
        f"one process         {rates[1]:>10,.0f}   {rates[1] / rates[0]:.0%} of tokenizer(texts), "
        f"{rates[1] / fastest:.0%} of its Rust part"
    )
    print(f"two processes       {rates[2]:>10,.0f}   {rates[2] / rates[1]:.2f} x one process")
    print(f"one and two processes give the same bytes: {same}")
    print(f"killed and rerun    {killed}")
    for key, label in (("peak_mb", "main process"), ("child_peak_mb", "largest worker")):
        print(
            f"peak of the {label}: {small[key]:,.0f} MB, {two[key]:,.0f} MB for four times as "
            f"many ({two[key] / small[key]:.3f} x)"
        )


if __name__ == "__main__":
    main()
