"""Preparation: its rate beside the bare tokenizer's, its memory, and a run that is killed.

    python benchmarks/bench_prepare.py [--part rates] [--part file] [--tokenizer DIR]

    rates     the bare tokenizer on the rendered text against preparation in one process, for
              short questions, chats, and agents' conversations with tool results
    file      200,000 short ones (the least favourable): one process and two, start-up included;
              peak resident size beside a quarter of the file; SIGKILL in the middle, run again

Every arm of `file` is a process of its own; tokenizer threads are off. Files are made from a seed.
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
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
WORDS = (
    "the a of to in is that it was for on are as with his they at be this have from or one had by "
    "word but not what all were we when your can said there use an each which she do how their if "
    "return value function list number string error file line index token model train loss café"
).split()


def words(rng: random.Random, fewest: int, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(fewest, most)))


def short(rng: random.Random) -> list[dict]:
    """A question or two and their answers, about 90 tokens in all."""
    messages = []
    for _ in range(rng.choice((1, 1, 2))):
        for role, longest in (("user", 30), ("assistant", 40)):
            messages.append({"role": role, "content": words(rng, 5, longest)})
    return messages


def chat(rng: random.Random) -> list[dict]:
    """One to four questions with answers of some paragraphs."""
    messages = []
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": words(rng, 10, 80)})
        messages.append({"role": "assistant", "content": words(rng, 50, 350)})
    return messages


def agent(rng: random.Random) -> list[dict]:
    """A long instruction, then up to six rounds of a short answer and a long tool result."""
    messages = [
        {"role": "system", "content": words(rng, 300, 500)},
        {"role": "user", "content": words(rng, 10, 80)},
    ]
    for _ in range(rng.randint(2, 6)):
        messages.append({"role": "assistant", "content": words(rng, 10, 60)})
        messages.append({"role": "tool", "content": words(rng, 100, 800)})
    return [*messages, {"role": "assistant", "content": words(rng, 30, 150)}]


KINDS = {"short": (short, 40_000), "chat": (chat, 4_000), "agent": (agent, 800)}


def write_file(path: Path, conversations: int, kind=short) -> None:
    rng = random.Random(0)
    with open(path, "w") as file:
        for _ in range(conversations):
            file.write(json.dumps({"messages": kind(rng)}) + "\n")


def bare_arm(tokenizer, path: Path) -> dict:
    """The tokenizer alone, on the text that the chat template makes of the rows.

    seconds: tokenizer(texts), as everyone calls it; fastest: its Rust part without offsets. Each
    also as processor time, which other programs on the machine leave alone.
    """
    backend = tokenizer.backend_tokenizer
    found = dict.fromkeys(("seconds", "seconds_cpu", "fastest", "fastest_cpu"), 0.0)
    found["conversations"] = 0

    def encode(texts: list[str]) -> None:
        for key, call in (("seconds", tokenizer), ("fastest", backend.encode_batch_fast)):
            start, cpu = time.perf_counter(), time.process_time()
            call(texts, add_special_tokens=False)
            found[key] += time.perf_counter() - start
            found[f"{key}_cpu"] += time.process_time() - cpu
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


def peak_mb() -> float:
    """Highest resident size of this program.

    Not ru_maxrss: that survives the start of a program, and so holds what its parent had, the
    whole target where the parent has just converted it.
    """
    [line] = [x for x in open("/proc/self/status") if x.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


def prepare_arm(tokenizer, path: Path, cache: str, processes: int) -> dict:
    from specforge_trim.data.dataset import prepare

    start, cpu = time.perf_counter(), time.process_time()
    data = prepare(
        path, tokenizer, cache_dir=cache, max_length=32_768, processes=processes, progress=False
    )
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": time.perf_counter() - start,
        "seconds_cpu": time.process_time() - cpu,
        "children_cpu": children.ru_utime + children.ru_stime,
        "conversations": len(data),
        "tokens": data.num_tokens,
        "peak_mb": peak_mb(),
        "child_peak_mb": children.ru_maxrss / 1024,
        "folder": str(data.folder),
    }


def rates_arm(tokenizer, path: Path, cache: str) -> dict:
    rounds = []
    for k in range(3):
        bare = bare_arm(tokenizer, path)
        ours = prepare_arm(tokenizer, path, f"{cache}/{k}", 1)
        rounds.append([bare["seconds_cpu"], bare["fastest_cpu"], ours["seconds_cpu"]])
    return {"medians": [median(c) for c in zip(*rounds, strict=True)], "tokens": ours["tokens"]}


def run_arm(arguments) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    path = Path(arguments.file)
    if arguments.arm == "bare":
        found = bare_arm(tokenizer, path)
    elif arguments.arm == "rates":
        found = rates_arm(tokenizer, path, arguments.cache)
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


def rates_part(arguments, folder: Path) -> None:
    """Processor time; three rounds of both arms in turn, of which the median counts."""
    print(f"{'':>6} {'rows':>7} {'tokens':>9} {'tokenizer(texts)':>17} {'its Rust part':>14}")
    for name, (kind, count) in KINDS.items():
        file = folder / f"{name}.jsonl"
        write_file(file, count, kind)
        found = measure(arguments, "rates", file, folder / name)
        call, fastest, seconds = found["medians"]
        print(
            f"{name:>6} {count:>7,} {found['tokens']:>9,} {call / seconds:>17.0%} "
            f"{fastest / seconds:>14.0%}   {1e6 * seconds / count:,.0f} us a row, "
            f"{found['tokens'] / seconds:,.0f} tokens/s"
        )


def file_part(arguments, folder: Path) -> None:
    whole, quarter = folder / "whole.jsonl", folder / "quarter.jsonl"
    write_file(whole, arguments.conversations)
    write_file(quarter, arguments.conversations // 4)
    bare = measure(arguments, "bare", quarter, folder)
    small = measure(arguments, "prepare", quarter, folder / "small", 2)
    killed = killed_arm(arguments, quarter, folder / "killed", small, small["seconds"] * 0.9)
    one = measure(arguments, "prepare", whole, folder / "one")
    two = measure(arguments, "prepare", whole, folder / "two", 2)
    rates = [arm["conversations"] / arm["seconds"] for arm in (bare, one, two)]
    fastest = bare["conversations"] / bare["fastest"]
    print(f"{one['conversations']:,} conversations, {one['tokens']:,} tokens; rates per second")
    print(f"tokenizer(texts)    {rates[0]:>10,.0f}")
    print(f"  its Rust part     {fastest:>10,.0f}")
    print(
        f"one process         {rates[1]:>10,.0f}   {rates[1] / rates[0]:.0%} of tokenizer(texts), "
        f"{rates[1] / fastest:.0%} of its Rust part"
    )
    print(f"two processes       {rates[2]:>10,.0f}   {rates[2] / rates[1]:.2f} x one process")
    each = [bare[f"{key}_cpu"] / bare["conversations"] for key in ("seconds", "fastest")]
    ours = one["seconds_cpu"] / one["conversations"]
    print(
        f"one process, in processor time: {each[0] / ours:.0%} of tokenizer(texts), "
        f"{each[1] / ours:.0%} of its Rust part"
    )
    cores = [(arm["seconds_cpu"] + arm["children_cpu"]) / arm["seconds"] for arm in (one, two)]
    print(f"cores the machine gave them: {cores[0]:.2f} of 1, {cores[1]:.2f} of 2")
    same = same_bytes(one["folder"], two["folder"])
    print(f"one and two processes give the same bytes: {same}")
    print(f"killed and rerun    {killed}")
    for key, label in (("peak_mb", "main process"), ("child_peak_mb", "largest worker")):
        print(
            f"peak of the {label}: {small[key]:,.0f} MB, {two[key]:,.0f} MB for four times as "
            f"many ({two[key] / small[key]:.3f} x)"
        )


PARTS = {"rates": rates_part, "file": file_part}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=PARTS, action="append", help="default: both")
    parser.add_argument(
        "--tokenizer", help="folder of a tokenizer; default: the embedded target's"
    )
    parser.add_argument("--conversations", type=int, default=200_000)
    parser.add_argument("--arm", choices=("bare", "prepare", "rates"), help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm is not None:
        run_arm(arguments)
        return
    if arguments.tokenizer is None:
        from specforge_trim.verifier.embedded import resolve_target

        arguments.tokenizer = str(
            resolve_target("smollm2-135m-instruct", cache_dir=ROOT / ".quickstart")
        )
    with tempfile.TemporaryDirectory() as name:
        for part in arguments.part or list(PARTS):
            PARTS[part](arguments, Path(name))


if __name__ == "__main__":
    main()
