"""Write a trained draft as the folder that serving engines load, and read it back.

    model.safetensors   the draft's tensors under their serving names, nothing else
    config.json         the complete configuration, both rope forms
    README.md           model card: provenance, acceptance, how to serve it
    training.json       how it was made (only when given); engines do not read it

Two layouts (drafts/eagle3/formats.py): native, which SGLang, vLLM and TensorRT-LLM share, and
speculators, which vLLM and speculators read.

The folder is written under a temporary name, loaded again and compared, and only then renamed:
a folder with the final name is complete and has been loaded once.

Letters: D draft width, Dt target width, V target vocabulary, Vd draft vocabulary.
"""

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specforge_trim.drafts.eagle3.card import CARD, is_own_card, model_card
from specforge_trim.drafts.eagle3.formats import (
    LAYOUTS,
    own_names,
    speculators_config,
    speculators_names,
)
from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.reading import CONFIG, EMBEDDING, MAPS, WEIGHTS, load_draft
from specforge_trim.drafts.eagle3.rope import MULTIMODAL_KEYS, rope_frequencies
from specforge_trim.drafts.eagle3.sizes import DraftConfig
from specforge_trim.drafts.eagle3.vocab import check_maps
from specforge_trim.verifier.aux_layers import exported_aux_keys, resolve_aux_layers

__all__ = ["export_draft", "load_draft", "check_export", "serving_config", "serving_tensors"]

log = logging.getLogger(__name__)

TRAINING = "training.json"
DEPTH = 5  # tokens drafted per round, in the commands of the model card


def export_draft(
    model: Eagle3Draft,
    out_dir: str | Path,
    *,
    target_config: Any,
    training: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    layout: str = "native",
    target_name: str | None = None,
) -> Path:
    """Write `model` as a serving folder and return its path.

    Args:
        model: the draft; its floats are converted to `dtype`, the model itself stays as it is.
        out_dir: folder to create. An earlier export there is replaced as a whole; a folder that
            holds anything else is refused.
        target_config: the target's transformers configuration.
        training: provenance to keep beside the weights (JSON values), not read by engines.
        dtype: float format on disk; None = float16 for a float16 target, else bfloat16.
        layout: native or speculators.
        target_name: folder or hub id of the target, for the model card and the speculators
            layout; None = what target_config says.

    Raises:
        ValueError: the draft does not fit the target, its vocabulary maps disagree, or what was
            written does not load back to the same tensors and logits.
    """
    out = Path(out_dir)
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: expected one of {', '.join(LAYOUTS)}")
    if model.config.num_hidden_layers != 1:
        raise ValueError(
            f"num_hidden_layers={model.config.num_hidden_layers}: the serving engines share a "
            "layout for drafts of one layer only; train with num_hidden_layers 1 to export"
        )
    if dtype is None:
        is_half = str(getattr(target_config, "dtype", None)).removeprefix("torch.") == "float16"
        dtype = torch.float16 if is_half else torch.bfloat16
    config = serving_config(model.config, target_config=target_config, dtype=dtype)
    tensors = serving_tensors(model, dtype=dtype)
    name = str(target_name or getattr(target_config, "_name_or_path", "") or "TARGET")
    texts = {CARD: model_card(config, target=name, layout=layout, training=training, depth=DEPTH)}
    if training is not None:
        texts[TRAINING] = _json(training)
    if layout == "native":
        texts[CONFIG] = _json(config.to_dict())
    else:
        tensors = speculators_names(tensors)
        known = list(getattr(target_config, "architectures", None) or [])
        texts[CONFIG] = _json(
            speculators_config(config, verifier=name, architectures=known, depth=DEPTH)
        )
    _warn_of_readers(config)
    return _write_checked(out, tensors, texts, config=model.config)


def _write_checked(
    out: Path, tensors: dict[str, Tensor], texts: dict[str, str], *, config: DraftConfig
) -> Path:
    """Write the files beside `out`, load them, compare, and only then rename."""
    _refuse_foreign_folder(out)
    folder = out.resolve()  # a linked folder is replaced where it is, on its own disk
    folder.parent.mkdir(parents=True, exist_ok=True)
    # One fixed name, so that what a killed run left behind goes with the next export.
    temporary = folder.parent / f".{folder.name}.writing"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        _save(tensors, temporary / WEIGHTS)
        # save_file leaves the file to its writer alone; a server may run as another user.
        (temporary / WEIGHTS).chmod(0o644)
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")
        check_export(temporary, tensors, config)
        _replace_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """One safetensors file. OSError names it when it cannot be written, on a full disk say."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # not OSError, whatever the reason
        raise OSError(f"{path} cannot be written: {error}") from None


def serving_config(config: DraftConfig, *, target_config: Any, dtype: torch.dtype) -> DraftConfig:
    """The configuration to write: the draft's, with what serving takes from the target.

    From the target: max_position_embeddings (with a warning when the draft was configured with
    another) and missing token ids. Aux layers equal to the target's default set become None,
    since engines number explicit ids in two ways and the default in one.
    Raises ValueError naming the key when target_hidden_size, vocab_size or aux_layers disagree.
    """
    text = target_config.get_text_config()
    for key, target_key in (("target_hidden_size", "hidden_size"), ("vocab_size", "vocab_size")):
        mine, theirs = getattr(config, key), getattr(text, target_key)
        if mine != theirs:
            raise ValueError(f"draft {key} is {mine}; the target's {target_key} is {theirs}")
    if config.max_position_embeddings != text.max_position_embeddings:
        log.warning(
            "draft config: max_position_embeddings=%d; exporting the target's %d",
            config.max_position_embeddings,
            text.max_position_embeddings,
        )
    layers = resolve_aux_layers(text.num_hidden_layers, config.aux_layers)
    is_default = not exported_aux_keys(text.num_hidden_layers, layers)
    token_ids: dict[str, Any] = {
        key: getattr(text, key, None)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        if getattr(config, key) is None
    }
    rope = {k: v for k, v in config.rope_parameters.items() if k not in MULTIMODAL_KEYS}
    _check_rope_at_limit(config, text.max_position_embeddings)
    return dataclasses.replace(
        config,
        max_position_embeddings=text.max_position_embeddings,
        aux_layers=None if is_default else layers,
        rope_parameters=rope,
        dtype=str(dtype).removeprefix("torch."),
        **token_ids,
    )


def _check_rope_at_limit(config: DraftConfig, limit: int) -> None:
    """Raise ValueError when the target's limit gives other rotary tables than training had."""
    tables = [
        rope_frequencies(
            config.rope_parameters, head_dim=config.head_dim, max_position_embeddings=positions
        )
        for positions in (config.max_position_embeddings, limit)
    ]
    if tables[0][1] != tables[1][1] or not torch.equal(tables[0][0], tables[1][0]):
        raise ValueError(
            f"max_position_embeddings={config.max_position_embeddings} of the draft config, and "
            f"the target's {limit} gives other rotary positions for rope_type="
            f"{config.rope_parameters['rope_type']!r}: train with the target's limit"
        )


def _warn_of_readers(config: DraftConfig) -> None:
    """Say what some engines would read differently."""
    if config.vllm_only:
        log.warning(
            "export: %s is read by vLLM only; SGLang and TensorRT-LLM would load a broken draft",
            ", ".join(config.vllm_only),
        )
    if config.rope_parameters["rope_type"] in ("dynamic", "longrope"):
        log.warning(
            "export: engines differ in rope_type=%s (which lengths are scaled, and how): measure "
            "the acceptance where the draft is served",
            config.rope_parameters["rope_type"],
        )


def serving_tensors(model: Eagle3Draft, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of the file on the CPU: floats as `dtype`, d2t int64, t2d bool.

    The maps are left out when Vd == V. Raises ValueError for maps that disagree or were never
    set, for an embedding that is not [V, D], and for a value that is not finite.
    """
    config = model.config
    tensors = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    check_maps(tensors["d2t"], tensors["t2d"], vocab_size=config.vocab_size)
    expected = (config.vocab_size, config.hidden_size)
    if tuple(tensors[EMBEDDING].shape) != expected:
        raise ValueError(
            f"{EMBEDDING} has shape {list(tensors[EMBEDDING].shape)}; engines read "
            f"[vocab_size, hidden_size] = {list(expected)}: hidden_size must equal "
            "target_hidden_size for a draft that shares the target's embedding"
        )
    if config.draft_vocab_size == config.vocab_size:
        for name in MAPS:
            del tensors[name]
    for name, value in tensors.items():
        if value.is_floating_point():
            converted = value.to(dtype)
            if not bool(torch.isfinite(converted).all()):
                raise ValueError(f"{name} holds a value that is not finite in {dtype}")
            tensors[name] = converted.contiguous()
    return tensors


def check_export(folder: Path, tensors: dict[str, Tensor], config: DraftConfig) -> None:
    """Load `folder` and compare it with what was meant: every tensor, then logits of a probe.

    tensors: under the names of the file.

    The probe runs the loaded draft against one built from `tensors` and the draft's own `config`,
    so that a key lost on the way through config.json shows. Raises ValueError.
    """
    written = load_file(folder / WEIGHTS)
    if set(written) != set(tensors):
        raise ValueError(f"{folder}: tensors {sorted(written)}; expected {sorted(tensors)}")
    for name, value in tensors.items():
        if written[name].dtype != value.dtype or not torch.equal(written[name], value):
            raise ValueError(f"{folder}: {name} does not read back as it was written")
    with torch.random.fork_rng(devices=[]):
        meant = Eagle3Draft(config)
    meant.load_state_dict(own_names(tensors), strict=False)
    # One set of positions for both: the two configurations may have different limits.
    far = config.max_position_embeddings
    mine = _probe(meant, far=far)
    theirs = _probe(load_draft(folder, dtype=torch.float32), far=far)
    error = float((mine - theirs).abs().max())
    # The same arithmetic on the same numbers: only memory alignment may change a last bit.
    if not error <= 1e-5 * max(1.0, float(mine.abs().max())):
        raise ValueError(f"{folder}: logits of the reloaded draft differ by {error:.3g}")


@torch.no_grad()
def _probe(model: Eagle3Draft, *, far: int) -> Tensor:
    """Logits [12, Vd] of two chained steps over six rows at positions up to `far`, in fp32."""
    config = model.config
    generator = torch.Generator().manual_seed(0)
    width = config.num_aux_layers * config.target_hidden_size
    aux = torch.randn(6, width, generator=generator)
    ids = torch.randint(config.vocab_size, (7,), generator=generator)
    positions = torch.tensor([0, 1, 2, far // 4, far // 2, far - 2]).clamp(min=0)
    hidden, out = model.project_aux(aux), []
    for step in range(2):
        q, k, v = model.query_key_value(
            model.embed(ids[step : step + 6]), hidden, positions + step
        )
        attention = F.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True,
            enable_gqa=True,
        )  # fmt: skip
        output = model.finish(hidden, attention.transpose(0, 1))
        out.append(model.logits(output))
        hidden = model.feedback(output)
    return torch.cat(out)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def _refuse_foreign_folder(out: Path) -> None:
    """An export replaces an earlier export as a whole, and never someone's other files."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; expected a folder to write the draft to")
    if out.is_dir():
        foreign = sorted({p.name for p in out.iterdir()} - {WEIGHTS, CONFIG, TRAINING, CARD})
        if foreign:
            raise ValueError(
                f"{out} holds other files ({', '.join(foreign[:5])}); expected an earlier "
                "export or a folder that does not exist"
            )
        # A target, or a draft of another trainer, may consist of files of the same names.
        if any(out.iterdir()) and not is_own_card(out):
            raise ValueError(
                f"{out} holds a model that was not exported here; expected an earlier export or a "
                "folder that does not exist"
            )


def _replace_folder(new: Path, out: Path) -> None:
    """Rename `new` to `out`. A non-empty folder cannot be renamed onto, so `out` moves first."""
    old = out.parent / f".{out.name}.old"
    if not out.exists():
        new.rename(out)
        shutil.rmtree(old, ignore_errors=True)  # of an export that was killed between the renames
        return
    shutil.rmtree(old, ignore_errors=True)
    out.rename(old)
    try:
        new.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old)
