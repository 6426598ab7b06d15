"""Every kind of node from the command line, on a plain and a GQA model: score, then whatever reads the result."""

from __future__ import annotations

import csv
import io
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import definitions
import headspan as hs
from headspan.cli import _run
from headspan.node_kinds.opening import node_sets
from headspan.vocabulary.errors import HeadspanError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

D = 16
WORDS = ["<unk>", "<s>", "ĠParis", "ĠLondon", "Paris", *(f"w{i}" for i in range(25))]
# What is given, a node that reads with the vectors it reads, and one that writes; {m} is the model.
KINDS: dict[str, tuple[str, str, str]] = {
    "files": ("--nodes {m}/../probes.npz@2 --add {m}/../probe.npy", "probe", "a"),
    "neurons": ("--neurons L1:3 --neurons L0:1-2", "L1N3", "L0N1"),
    "tokens": ("--tokens ' Paris, London' --tokens '<id 9>'", "_Paris", "_London"),
    "features": ("--sae {m}/../sae:0,2-3", "sae[2]", "sae[0]"),
    "transcoder": ("--sae {m}/../transcoder:1", "transcoder[1]", "transcoder[1]"),
    "components": (
        "--components {m}-spd.safetensors:L1.{reads}:1,4 --components {m}-spd.safetensors:L0.{writes}",
        "{name}-spd/L1.{reads}[4]",
        "{name}-spd/L0.{writes}[2]",
    ),
    "adapter": ("--adapter {m}-lora", "{name}-lora/L1.{reads}", "{name}-lora/L0.{writes}"),
}
MODULES = {"gpt2": ("attn.c_attn", "attn.c_proj"), "llama": ("self_attn.v_proj", "self_attn.o_proj")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder, rng = tmp_path_factory.mktemp("kinds"), np.random.default_rng(0)
    common = {"vocab_size": len(WORDS), "bos_token_id": 1, "eos_token_id": 1}
    made = {
        "gpt2": transformers.GPT2Config(n_embd=D, n_layer=3, n_head=4, n_positions=8, n_inner=20, **common),
        "llama": transformers.LlamaConfig(
            hidden_size=D, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            tie_word_embeddings=False, **common,
        ),
    }  # fmt: skip
    for name, config in made.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        _randomise(model.parameters())
        model.save_pretrained(folder / name)
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.save(str(folder / name / "tokenizer.json"))
        targets = [module.rpartition(".")[2] for module in MODULES[name]]
        tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=name == "gpt2"))
        _randomise(p for n, p in tuned.named_parameters() if "lora_" in n)
        tuned.save_pretrained(folder / f"{name}-lora")
        save_components(
            folder / f"{name}-spd.safetensors",
            {f"{module_path(name)}.{i}.{m}": 5 for i, m in enumerate(MODULES[name][::-1])},
        )
    np.save(folder / "probe.npy", rng.normal(size=D))
    np.savez(folder / "probes.npz", a=rng.normal(size=D), b=rng.normal(size=(D, 3)))
    hooks = {"hook_name": "blocks.1.ln2.hook_normalized", "hook_name_out": "blocks.1.hook_mlp_out"}
    for name, config in (
        ("sae", {"metadata": {"hook_name": "blocks.2.hook_resid_pre"}, "architecture": "jumprelu"}),
        ("transcoder", {"architecture": "transcoder", "d_out": D, **hooks}),
    ):
        write_sae(folder / name, config)
    return folder


def module_path(name: str) -> str:
    return "transformer.h" if name == "gpt2" else "model.layers"


def save_components(path: Path, modules: dict[str, int], d_out: int | None = None) -> None:
    """Factors as SPD saves them, in a file with other tensors; c_attn and v_proj are not square."""
    rng = np.random.default_rng(2)
    tensors = {"_ci_fns.x.W": np.ones(3)}
    for module, count in modules.items():
        out = d_out or {"c_attn": 3 * D, "v_proj": D // 2}.get(module.rpartition(".")[2], D)
        stem = f"_components.{module.replace('.', '-')}"
        tensors |= {f"{stem}.V": rng.normal(size=(D, count)), f"{stem}.U": rng.normal(size=(count, out))}
    save_file({name: tensor.astype(np.float32) for name, tensor in tensors.items()}, path)


def _randomise(parameters: Any) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(0, 0.3)


def write_sae(folder: Path, config: Any, **more: np.ndarray) -> Path:
    rng = np.random.default_rng(1)
    folder.mkdir(exist_ok=True)
    (folder / "cfg.json").write_text(json.dumps(config))
    tensors = {"W_enc": rng.normal(size=(D, 6)), "W_dec": rng.normal(size=(6, D)), **more}
    save_file({k: v.astype(np.float32) for k, v in tensors.items()}, folder / "sae_weights.safetensors")
    return folder


def run(words: str, capfd: pytest.CaptureFixture[str], code: int = 0) -> tuple[str, str]:
    assert _run(shlex.split(words)) == code, capfd.readouterr().err
    shown = capfd.readouterr()
    return shown.out, shown.err


def read_vectors(model: Path, kind: str) -> np.ndarray:
    """What the first node of a kind reads, straight from the files: (d, r)."""
    state = {k: v.astype(np.float64) for k, v in load_file(model / "model.safetensors").items()}
    gpt2 = model.name == "gpt2"
    if kind == "files":
        return np.load(model.parent / "probe.npy")[:, None]
    if kind == "neurons" and gpt2:
        return state["transformer.h.1.mlp.c_fc.weight"][:, 3:4]
    if kind == "neurons":
        return np.stack([state[f"model.layers.1.mlp.{n}_proj.weight"][3] for n in ("gate", "up")], axis=1)
    if kind == "tokens":
        return state["transformer.wte.weight" if gpt2 else "lm_head.weight"][WORDS.index("ĠParis")][:, None]
    if kind == "components":
        stored = load_file(model.parent / f"{model.name}-spd.safetensors")
        module = f"{module_path(model.name)}.1.{MODULES[model.name][0]}"
        return stored[f"_components.{module.replace('.', '-')}.V"][:, 4:5]
    if kind == "adapter":
        lora = load_file(model.parent / f"{model.name}-lora/adapter_model.safetensors")
        return next(v for k, v in lora.items() if f".1.{MODULES[model.name][0]}.lora_A" in k).T
    tensors = load_file(model.parent / ("sae" if kind == "features" else "transcoder") / "sae_weights.safetensors")
    return tensors["W_enc"][:, [2 if kind == "features" else 1]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_from_score_to_the_page(
    name: str, kind: str, place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, result = place / name, tmp_path / "r.safetensors"
    reads, writes = MODULES[name]
    options, reader, writer = (text.format(m=model, name=name, reads=reads, writes=writes) for text in KINDS[kind])
    run(f"score {model} --metric pk --pairing flow {options} --out {result}", capfd)
    scores, weights = hs.load(result), hs.open(model)
    matrix, vectors = scores["pk", "OR"], read_vectors(model, kind)
    rows = json.loads(run(f"top {result} --head '{reader}.R' -k 99 --json", capfd)[0])
    heads = {row["source"]: row["score"] for row in rows if row["pairing"] == "OR"}
    assert heads and heads == {str(e.source): e.score for e in matrix.top(9999) if str(e.target) == reader}
    for head, score in heads.items():
        assert score == pytest.approx(definitions.pk(weights.read_head(f"{head}.O"), vectors), abs=2e-5)
    for command in ("top", "hubs", "baseline", "wiring", f"compare {result}"):
        listed = json.loads(run(f"{command} {result} --json", capfd)[0])
        table = list(csv.DictReader(io.StringIO(run(f"{command} {result} --csv", capfd)[0])))
        assert {"OR", "WQ"} <= {row["pairing"] for row in listed} or kind == "tokens"
        assert [{k: "" if v is None else str(v) for k, v in row.items()} for row in listed] == table
    outs = " ".join(f"--out {tmp_path}/w.{end}" for end in ("graphml", "json", "csv"))
    run(f"wiring {result} --pairing OR -k 99 {outs}", capfd)
    assert all(reader in (tmp_path / f"w.{end}").read_text("utf-8") for end in ("graphml", "json", "csv"))
    if name == "llama":  # drawing takes longest, and is the same for both
        run(f"figures {result} --only wiring --only two-layer --format svg --out {tmp_path}/f", capfd)
        assert (tmp_path / "f/wiring.svg").is_file()
        run(f"report {result} --weights {model} --out {tmp_path}/p.html", capfd)
        assert json.dumps(reader)[1:-1] in (tmp_path / "p.html").read_text("utf-8")
    # Paths need the vectors again, and are of one hop what the result says.
    ways = f"paths {result} --weights {model} {options} --depth 1 -k 99 --json"
    into = json.loads(run(f"{ways} --to '{reader}'", capfd)[0])
    assert {row["source"]: row["score"] for row in into if row["pairing"] == "OR"} == pytest.approx(heads, abs=2e-5)
    out_of = json.loads(run(f"{ways} --from '{writer}'", capfd)[0])
    assert out_of and {row["source"] for row in out_of} == {writer}
    for row in out_of:
        assert scores["pk", row["pairing"]].at(writer, row["target"]) == pytest.approx(row["score"], abs=2e-5)


def test_paths_and_the_nodes_of_a_result(place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result, model = tmp_path / "r.safetensors", place / "gpt2"
    run(f"score {model} --metric pk --pairing flow --neurons L1:3 --out {result}", capfd)
    said = run(f"paths {result} --weights {model} --to L1N3", capfd, 2)[1]
    assert "L1N3" in said and "--nodes" in said
    assert "not those of the result" in run(f"paths {result} --weights {model} --neurons L0:1 --from l0n1", capfd)[1]
    rows = json.loads(run(f"paths {model} --neurons L1:3 --to L2H1.K --depth 2 --json -k 99", capfd)[0])
    assert "L1N3" in {row["via"] for row in rows}  # a plain neuron carries on what it reads
    made = f"paths {model} --neurons L1:3 --to L2H1.K --depth 2 -k 99 --out {tmp_path}/c.json"
    assert "heads and nodes" in run(made, capfd)[1]
    assert "L1N3" in run(f"wiring {result} --circuit {tmp_path}/c.json --csv", capfd)[0]
    for words, sentence in {
        "--to nobody": "no head or node 'nobody'",
        "--to L1N3.W": "Give L1N3.R instead",
        "--from L1N3.R": "Give L1N3.W instead",
        "--to L1N3.K": "is a node",
        "--pairing OQ --to L1N3": "reads with R",
    }.items():
        assert sentence in run(f"paths {model} --neurons L1:3 {words}", capfd, 2)[1]


def test_what_is_read_for_nodes_is_never_replaced(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for option, file in (("--sae", "sae/sae_weights"), ("--adapter", "gpt2-lora/adapter_model")):
        path = place / f"{file}.safetensors"
        before = path.read_bytes()
        run(f"score {place}/gpt2 {option} {path.parent} --out {path} --force", capfd, 2)
        assert path.read_bytes() == before


def test_nodes_by_their_kinds_in_python(place: Path) -> None:
    model = hs.open(place / "llama")
    found = hs.score(model, "pk", "OK", nodes=[{"neurons": "L1:3", "tokens": [" Paris"]}, place / "probe.npy"])
    assert {str(node) for node in found.heads("R")} == {"L1N3", "_Paris", "probe"}
    for wrong in ({}, {"neuron": "L1:3"}):
        with pytest.raises(HeadspanError, match="a mapping of nodes, sae, adapter"):
            hs.score(model, "pk", nodes=wrong)


@pytest.mark.parametrize("dtype", ["int8", "int64", "bool"])
def test_whole_numbers_are_numbers_in_every_kind_of_file(dtype: str, place: Path, tmp_path: Path) -> None:
    vector = np.arange(D).astype(dtype)
    np.save(tmp_path / "v.npy", vector)
    np.savez(tmp_path / "v.npz", v=vector)
    save_file({"v": vector}, tmp_path / "v.safetensors")
    torch.save(torch.from_numpy(vector), tmp_path / "v.pt")
    model = hs.open(place / "gpt2")
    rows = [hs.nodes(model, f"{file}@1", k=1).rows() for file in sorted(tmp_path.glob("v.*"))]
    assert len(rows) == 4 and rows[0] and all(row == rows[0] for row in rows)


def test_what_is_stored_next_to_a_vector(place: Path, tmp_path: Path) -> None:
    """A probe with its bias, an array of objects, a number: the message lists what can be named."""
    model = hs.open(place / "gpt2")
    np.savez(tmp_path / "p.npz", weight=np.ones((1, D)), bias=np.ones(1), about=np.array([{}], dtype=object))
    with pytest.raises(HeadspanError, match=r"Python objects.*name the array, .*p\.npz:weight"):
        node_sets(model, f"{tmp_path}/p.npz@1")
    (found,) = node_sets(model, f"{tmp_path}/p.npz:weight@1")
    assert found.name(0) == "weight" and "1 row of 16" in found.notes[0]
    with pytest.raises(HeadspanError, match="Python objects"):
        node_sets(model, f"{tmp_path}/p.npz:about@1")
    for layer in ("x", "-1", "1.5", ""):
        with pytest.raises(HeadspanError, match="is not a layer; write"):
            node_sets(model, f"{place}/probe.npy@{layer}")
    np.save(tmp_path / "bases.npy", np.random.default_rng(0).normal(size=(2, D, D)))
    (bases,) = node_sets(model, f"{tmp_path}/bases.npy")
    assert "2 bases of 16 columns of 16" in bases.notes[0] and "could be rows" in bases.notes[0]
    with pytest.raises(HeadspanError, match=r"probe of .*probe\.npy is given twice"):
        node_sets(model, [f"{place}/probe.npy@1", f"{place}/probe.npy@2"])


def test_words_that_the_tokenizer_does_not_know(place: Path) -> None:
    model = hs.open(place / "llama")

    def names(text: str) -> list[str]:
        return [node.name for found in node_sets(model, tokens=text) for node in found.nodes(hs.Role.R)]

    assert names(" Paris,<s>,_London,<unk>") == ["_Paris", "<s>", "_London", "<unk>"]  # as they are shown, too
    for word in ("zzz", " Rome"):
        with pytest.raises(HeadspanError, match="its tokenizer has no such text"):
            names(word)
    with pytest.raises(HeadspanError, match="so it has no tokens"):
        node_sets(hs.open({role: np.ones((2, 2, D, 4)) for role in "QKVO"}), tokens="<id 1>")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"hook_names": ["blocks.1.hook_resid_pre"]}, "does not name one hook.*hook_names is"),
        ({"hook_name": ["blocks.1.hook_resid_pre"]}, "does not name one hook.*hook_name is"),
        ({"hook_name": "blocks.2.hook_mlp_in", "hook_name_out": "blocks.0.hook_mlp_out"}, "which comes before it"),
    ],
)
def test_configs_that_name_no_place(config: Any, sentence: str, place: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadspanError, match=sentence):
        node_sets(hs.open(place / "gpt2"), sae=write_sae(tmp_path / "odd", config))


def test_crosscoders_and_contradictions(place: Path, tmp_path: Path) -> None:
    config = {"hook_name": "blocks.1.hook_resid_pre", "hook_layer": 2}
    (found,) = node_sets(hs.open(place / "gpt2"), sae=write_sae(tmp_path / "odd", config))
    assert "layer 2: the hook's name" in found.notes[0]
    with pytest.raises(HeadspanError, match=r"\(2, 16, 6\).*crosscoders"):
        node_sets(hs.open(place / "gpt2"), sae=write_sae(tmp_path / "odd", config, W_enc=np.ones((2, D, 6))))


@pytest.mark.parametrize("fold", [False, True])
def test_components_of_every_module(place: Path, tmp_path: Path, fold: bool) -> None:
    """Attention, both sides of an MLP, embedding and unembedding, by plain numpy; norms fold in where they are."""
    state = {k: v.astype(np.float64) for k, v in load_file(place / "llama/model.safetensors").items()}
    rng, tensors = np.random.default_rng(3), {}
    modules = {
        "model.layers.1.self_attn.q_proj": (16, 16), "model.layers.1.self_attn.k_proj": (16, 8),
        "model.layers.1.self_attn.o_proj": (16, 16), "model.layers.1.mlp.gate_proj": (16, 20),
        "model.layers.1.mlp.down_proj": (20, 16), "model.embed_tokens": (30, 16), "lm_head": (16, 30),
    }  # fmt: skip
    for module, (d_in, d_out) in modules.items():  # the older names
        tensors[f"target_model.{module}.components.V"] = rng.normal(size=(d_in, 3)).astype(np.float32)
        tensors[f"target_model.{module}.components.U"] = rng.normal(size=(3, d_out)).astype(np.float32)
    save_file(tensors, tmp_path / "c.safetensors")
    model = hs.fold(place / "llama") if fold else hs.open(place / "llama")
    sets = {found.label.rpartition(":")[2]: found for found in node_sets(model, components=f"{tmp_path}/c.safetensors")}
    gains = {"q_proj": "model.layers.1.input_layernorm", "k_proj": "model.layers.1.input_layernorm",
             "gate_proj": "model.layers.1.post_attention_layernorm", "lm_head": "model.norm"}  # fmt: skip
    assert len(sets) == len(modules)
    for module in modules:
        last = module.rpartition(".")[2]
        found = next(one for name, one in sets.items() if name.endswith(last))
        role = hs.Role.R if last in gains else hs.Role.W
        assert set(found.places) == {role} and found.population == 3 and found.kind == "component"
        factor = tensors[f"target_model.{module}.components.{'V' if role is hs.Role.R else 'U'}"]
        wanted = factor.T if role is hs.Role.R else factor
        if fold and last in gains:
            wanted = wanted * state[f"{gains[last]}.weight"]
        np.testing.assert_allclose(found.members(role, np.arange(3))[:, :, 0], wanted, rtol=1e-5)
    places = {name.rpartition(".")[2]: one.places for name, one in sets.items()}
    assert places["q_proj"][hs.Role.R].position == 2 and places["o_proj"][hs.Role.W].position == 2
    assert places["gate_proj"][hs.Role.R].position == 3 and places["embed_tokens"][hs.Role.W].position == -1


def test_components_that_do_not_fit(place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, model = tmp_path / "c.safetensors", place / "gpt2"
    save_components(path, {"transformer.h.0.attn.c_attn": 4, "transformer.h.9.attn.c_attn": 4, "h.1.attn.c_proj": 4})
    (first, second) = node_sets(hs.open(model), components=[f"{path}"])
    assert [first.name(0), second.name(3)] == ["c/L1.attn.c_proj[0]", "c/L0.attn.c_attn[3]"]
    assert "1 modules of c.safetensors are not in the model" in first.notes[0]
    for words, sentence in {
        f"{tmp_path}/none.safetensors": "no such file",
        f"{path}:h.5.attn": "has no module",
        f"{path}:L0.attn.c_attn:9": "go from 0 to 3",
        f"{path}:L0.attn.c_attn:x": "does not name components",
        f"{model}/model.safetensors": "has no components",
        f"{path}:transformer.h.9.attn.c_attn": "a module of",
    }.items():
        assert sentence in run(f"nodes {model} --components '{words}'", capfd, 2)[1]
    save_components(path, {"transformer.h.0.attn.c_attn": 4}, d_out=D)
    assert "must be (inputs, components)" in run(f"nodes {model} --components {path}", capfd, 2)[1]
    before = path.read_bytes()
    run(f"score {model} --components {path} --out {path} --force", capfd, 2)
    assert path.read_bytes() == before
