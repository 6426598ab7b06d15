"""Task circuits: a planted circuit is found edge by edge; induction in the demo, in Python and as a command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import headspan as hs
from families import FAMILIES, build
from headspan.cli import app
from headspan.results.tasks.task_result import SHARES
from headspan.vocabulary.errors import HeadspanError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headspan.running.opening import running  # noqa: E402
from headspan.running.tasks.graph_model import GraphModel  # noqa: E402
from headspan.running.tasks.measuring import Measuring  # noqa: E402
from headspan.running.tasks.prompts import task_prompts  # noqa: E402
from headspan.running.tasks.resamples import Resamples  # noqa: E402

SMALL: dict[str, Any] = {"prompts": 12, "k": 15}


@pytest.fixture(scope="module")
def induction(tmp_path_factory: pytest.TempPathFactory) -> tuple[hs.Task, Path]:
    folder = tmp_path_factory.mktemp("task")
    scores = hs.score("demo", ["pk", "cs"])
    scores.save(folder / "scores.safetensors")
    found = hs.task("demo", "induction", scores=scores, circuit="auto", out=folder / "task.safetensors", **SMALL)
    return found, folder


def command(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


# -- planted -----------------------------------------------------------------------------------------------------


def copying_model() -> Any:
    """Tokens 1 to 4 are copied: L0H1 moves them to a second subspace, L1H0 from there to a third, which is read."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=6, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=16, tie_word_embeddings=False,
        attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.ones_like(parameter) if "norm" in name else torch.zeros_like(parameter))
        body, four = model.model, torch.eye(4).double()
        body.embed_tokens.weight[:, 0] = 40.0  # a constant that every norm divides by
        body.embed_tokens.weight[1:5, 1:5] = four
        first, second = (layer.self_attn for layer in body.layers)
        first.v_proj.weight[8:12, 1:5], first.o_proj.weight[5:9, 8:12] = 40 * four, four
        second.v_proj.weight[0:4, 5:9], second.o_proj.weight[9:13, 0:4] = 40 * four, four
        model.lm_head.weight[1:5, 9:13] = 40 * four
    return model


PLANTED = [("L1H0.O", "logits.R"), ("L0H1.O", "L1H0.V"), ("embedding.W", "L0H1.V")]
ROWS = [
    {"clean": [5, a, 5, 5], "corrupted": [5, b, 5, 5], "answer": a, "wrong": b}
    for a in (1, 2, 3)
    for b in (3, 4)
    if a != b
]


@pytest.mark.parametrize("method", ["eap", "ig"])
def test_a_planted_circuit_is_recovered_edge_by_edge(method: str) -> None:
    found = hs.task(copying_model(), ROWS, method=method, k=6, circuit=3, dtype="stored")
    listed = [(row["source"], row["target"]) for row in found.rows()]
    assert set(listed[:3]) == set(PLANTED)
    assert {(edge["source"], edge["target"]) for edge in found.edges()} == set(PLANTED)
    sizes = np.sort(np.abs(found.attribution.ravel()))[::-1]
    assert sizes[2] > 50 * sizes[3]  # the others act through the norms alone
    assert found.faithfulness == pytest.approx(1, abs=0.01)
    assert [str(head) for head in found.labels().classes] == ["L0H1", "L1H0"]
    best = found.rows()[0]
    assert best["exact"] == pytest.approx(-found.values["clean"] + found.values["corrupted"], rel=0.01)


def test_without_one_planted_edge_nothing_is_left() -> None:
    model, table = copying_model(), None
    for left_out in PLANTED:
        table = table or hs.task(model, ROWS, k=1, verify=False, dtype="stored").table
        kept = table.mask.copy()
        kept[table.place(*left_out)] = False
        circuit = hs.Circuit.of_table(table, np.ones(kept.shape), kept, "one left out", "")
        assert hs.task(model, ROWS, k=1, circuit=circuit, dtype="stored").faithfulness == pytest.approx(0, abs=0.01)


# -- the demo ----------------------------------------------------------------------------------------------------


def test_what_a_task_says_of_the_demo(induction: tuple[hs.Task, Path]) -> None:
    found, _ = induction
    assert found.values["solved"] == 1 and found.values["clean"] > 5 and abs(found.values["corrupted"]) < 3
    rows = found.rows()
    assert len(rows) == SMALL["k"]
    assert [abs(row["attribution"]) for row in rows] == sorted((abs(row["attribution"]) for row in rows), reverse=True)
    assert all(0 < row["frequency"] <= 1 and row["exact"] is not None for row in rows)
    assert np.corrcoef([row["attribution"] for row in rows], [row["exact"] for row in rows])[0, 1] > 0.8
    between = [row for row in rows if row["source"].startswith("L0") and row["target"].startswith("L1")]
    assert between and all(row["pk_rank"] >= 1 and row["pk"] > 0 for row in between)
    assert all(row["pk"] is None for row in rows if row["target"] == "logits.R")
    assert {row["similarity"] for row in found.overlap()} == {"pk", "cs"}


def test_similarities_are_those_of_the_result(induction: tuple[hs.Task, Path]) -> None:
    found, _ = induction
    scores = hs.score("demo", ["pk", "cs"])
    for row, column in zip(*np.nonzero(found.table.between_heads), strict=True):
        source, target = found.table.writers[row], found.table.readers[column]
        matrix = scores["pk", f"O{target.role}"].forward()
        assert found.similarities["pk"][row, column] == pytest.approx(matrix.at(source.head, target.head))
        assert found.similarities["pk_rank"][row, column] == matrix.rank_of(source.head, target.head)


def test_the_curve_and_its_areas(induction: tuple[hs.Task, Path]) -> None:
    found, _ = induction
    assert [point["share"] for point in found.curve] == list(SHARES)
    values = [point["faithfulness"] for point in found.curve]
    assert values[-1] == pytest.approx(1, abs=1e-6)
    assert found.cpr == pytest.approx(np.trapezoid(values, SHARES))
    assert found.cmd == pytest.approx(np.trapezoid(np.abs(1 - np.array(values)), SHARES))


def test_auto_is_the_smallest_faithful_circuit(induction: tuple[hs.Task, Path]) -> None:
    found, _ = induction
    count = int(found.edges_kept.sum())
    assert found.faithfulness is not None and found.faithfulness >= 0.8
    smaller = hs.task("demo", "induction", circuit=count - 1, verify=False, **SMALL)
    assert smaller.faithfulness is not None and smaller.faithfulness < 0.8
    assert (smaller.edges_kept <= found.edges_kept).all()


def test_a_task_is_saved_and_loaded(induction: tuple[hs.Task, Path]) -> None:
    found, folder = induction
    again = hs.load(folder / "task.safetensors")
    assert isinstance(again, hs.Task) and again == found and again.cpr == found.cpr
    np.testing.assert_array_equal(again.edges_kept, found.edges_kept)
    assert repr(found).startswith("induction in demo: 310 edges, solves 100% of 12 prompts")
    assert again.to_dict()["kind"] == "task"


def test_labels_and_evaluation_of_a_task(induction: tuple[hs.Task, Path]) -> None:
    found, folder = induction
    labels = hs.Labels.load(folder / "task.safetensors")
    assert labels.names == ("induction",) and labels.classes == found.labels().classes
    ends = {end for row in found.edges() for end in (row["source"], row["target"])}
    assert {str(head) for head in labels.classes} == {end.split(".")[0] for end in ends if end.startswith("L")}
    told = command("evaluate", folder / "scores.safetensors", "--labels", folder / "task.safetensors", "--json")
    assert told.exit_code == 0, told.output
    with_labels = command("top", folder / "scores.safetensors", "--labels", folder / "task.safetensors", "-k", 3)
    assert with_labels.exit_code == 0 and "induction" in with_labels.output


def test_circuits_and_graphs_are_written_and_read_again(induction: tuple[hs.Task, Path], tmp_path: Path) -> None:
    found, _ = induction
    found.to_circuit().save(tmp_path / "circuit.json")
    for name in ("graph.json", "graph.pt"):
        found.save_graph(tmp_path / name)
    for name in ("circuit.json", "graph.json", "graph.pt"):
        again = hs.task("demo", "induction", circuit=tmp_path / name, verify=False, **SMALL)
        np.testing.assert_array_equal(again.edges_kept, found.edges_kept)
        assert again.faithfulness == pytest.approx(found.faithfulness, abs=1e-6)


def test_memory_changes_nothing(induction: tuple[hs.Task, Path]) -> None:
    found, _ = induction
    little = hs.task("demo", "induction", circuit="auto", memory="1MB", **SMALL)
    np.testing.assert_allclose(little.attribution, found.attribution, atol=1e-4)
    assert int(little.edges_kept.sum()) == int(found.edges_kept.sum())


def test_the_command_prints_what_the_function_returns(induction: tuple[hs.Task, Path], tmp_path: Path) -> None:
    found, folder = induction
    options = ("--prompts", 12, "-k", 15, "--scores", folder / "scores.safetensors", "--circuit", "auto")
    files = (
        "--out",
        tmp_path / "t.safetensors",
        "--circuit-out",
        tmp_path / "c.json",
        "--graph-out",
        tmp_path / "g.pt",
    )
    told = command("task", "demo", "induction", *options, *files)
    assert told.exit_code == 0, told.output
    table = [line for line in told.output.splitlines() if ".O " in line or line.startswith("source")]
    assert len(table) > 5 and max(map(len, table)) <= 80
    for fact in ("L0H3", "logits.R", "12 prompts, 100% solved", "held-out prompts", f"CPR {found.cpr:.3f}"):
        assert fact in told.output
    assert all((tmp_path / name).exists() for name in ("t.safetensors", "c.json", "g.pt"))
    listed = command("task", "demo", "induction", *options, "--json")
    rows = json.loads(listed.stdout[listed.stdout.index("[") :])
    assert [row["source"] for row in rows] == [row["source"] for row in found.rows()]
    assert [row["exact"] for row in rows] == pytest.approx([row["exact"] for row in found.rows()], abs=1e-5)


@pytest.mark.parametrize("objective", ["log-probability", "kl"])
def test_other_objectives(objective: str) -> None:
    found = hs.task("demo", "induction", objective=objective, circuit=40, **SMALL)
    assert found.values["clean"] > found.values["corrupted"]
    if objective == "kl":
        assert found.values["clean"] == 0
    assert found.faithfulness is not None and found.faithfulness > 0.5


# -- what cannot be done -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"method": "magic"}, ["magic", "ig", "eap"]),
        ({"objective": "speed"}, ["speed", "logit-difference"]),
        ({"objective": "kl", "method": "eap"}, ["zero", "ig"]),
        ({"k": 0}, ["k is 0"]),
        ({"circuit": 0}, ["0 edges", "auto"]),
        ({"circuit": "nowhere.json"}, ["nowhere.json"]),
        ({"prompts": 0}, ["prompts is 0"]),
    ],
)
def test_odd_arguments(options: dict[str, Any], facts: list[str]) -> None:
    with pytest.raises(HeadspanError) as error:
        hs.task("demo", "induction", **options)
    assert all(fact in str(error.value) for fact in facts)


@pytest.mark.parametrize(("name", "fact"), [("chess", "there is no task 'chess'"), ("no.csv", "no file no.csv")])
def test_an_unknown_task_is_reported_before_a_model_is_run(
    name: str, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(HeadspanError, match=fact):
        hs.task("demo", name)


def test_models_without_logits() -> None:
    with pytest.raises(HeadspanError, match="output head"):
        hs.task(build(FAMILIES["llama"]).model, ROWS)


def test_an_input_is_never_replaced(induction: tuple[hs.Task, Path]) -> None:
    _, folder = induction
    before = (folder / "scores.safetensors").read_bytes()
    with pytest.raises(HeadspanError):
        hs.task(
            "demo", "induction", scores=folder / "scores.safetensors", out=folder / "scores.safetensors", force=True
        )
    assert (folder / "scores.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("files", "facts"),
    [
        (["--graph-out", "g.txt"], ["g.txt", ".json or .pt"]),
        (["--circuit-out", "c.txt"], ["c.txt", ".json"]),
        (["--circuit-out", "both.json", "--graph-out", "both.json"], ["both.json", "another output"]),
    ],
)
def test_outputs_are_checked_before_the_model_runs(
    files: list[str], facts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = command("task", "no-such-model", "induction", "--circuit", 3, *files)
    assert told.exit_code != 0 and all(fact in str(told.exception) for fact in facts)
    assert not list(tmp_path.iterdir())


def test_a_model_that_does_not_solve_the_task_is_reported() -> None:
    with pytest.warns(hs.HeadspanWarning, match="solves only"):
        hs.task(build(FAMILIES["llama"]), [{**row, "clean": row["clean"][::-1]} for row in ROWS[:4]], k=2, verify=False)


def test_a_model_with_another_reader_of_the_stream_is_refused() -> None:
    """Something else that reads the stream is noticed, because corrupting all known readers is not enough."""
    model = build(FAMILIES["llama"])
    seen: list[Any] = []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out + 0.1 * seen[-1])
    with pytest.raises(HeadspanError, match=r"no task circuits for .*(reads the stream|stream)"):
        hs.task(model, ROWS, k=2)


@pytest.mark.parametrize("stop", [6, 12])
def test_ctrl_c_keeps_what_is_complete(stop: int) -> None:
    """Stopped among the attributions of the second batch, or while edges are measured exactly."""

    def progress(done: int, total: int) -> None:
        if done == stop:
            raise KeyboardInterrupt

    rows = [
        {**row, "clean": [5] * i + row["clean"], "corrupted": [5] * i + row["corrupted"]}
        for row in ROWS
        for i in (0, 1)
    ]
    with pytest.warns(hs.HeadspanWarning, match="interrupted"):
        found = hs.task(copying_model(), rows, k=3, circuit=3, dtype="stored", progress=progress)
    assert found.interrupted and found.circuit is None
    assert {(row["source"], row["target"]) for row in found.rows()} == set(PLANTED)
    assert np.isnan(found.exact).all()


def test_ctrl_c_before_anything_is_complete() -> None:
    def progress(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hs.task(copying_model(), ROWS, k=3, dtype="stored", progress=progress)


# -- parts -------------------------------------------------------------------------------------------------------


def test_inclusion_counts_resamples() -> None:
    """An edge that is largest on every prompt is always included, one that is never among the k largest never."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(20, 3, 4)).astype(np.float32)
    values[:, 0, 0], values[:, 2, 3] = 50, 0
    resamples = Resamples(20, np.ones((3, 4), dtype=bool), 0, 2**20)
    resamples.add(values)
    found = resamples.inclusion(2)
    assert found[0, 0] == 1 and found[2, 3] < 0.2 and found.sum() == pytest.approx(2)
    outside = np.ones((3, 4), dtype=bool)
    outside[0, 0] = False
    resamples = Resamples(20, outside, 0, 2**20)
    resamples.add(values)
    assert resamples.inclusion(2)[0, 0] == 0


def test_resamples_are_a_bootstrap_of_prompts() -> None:
    """Batches of any size give the frequencies of an ordinary bootstrap that holds all prompts at once."""
    rng = np.random.default_rng(1)
    values, mask = rng.normal(size=(17, 5, 6)).astype(np.float32), np.triu(np.ones((5, 6), dtype=bool))
    times = np.random.default_rng(3).multinomial(17, np.full(17, 1 / 17), size=200)
    sums = np.abs(np.tensordot(times, values, 1)) * mask
    order = np.argsort(-sums.reshape(200, -1), axis=1)[:, :4]
    expected = np.bincount(order.ravel(), minlength=30).reshape(5, 6) / 200
    for sizes in ([17], [4, 4, 4, 4, 1]):
        resamples = Resamples(17, mask, 3, 2**30)
        for part in np.split(values, np.cumsum(sizes)[:-1]):
            resamples.add(part)
        np.testing.assert_allclose(resamples.inclusion(4), expected, atol=0.006)  # a tie in float32
        np.testing.assert_allclose(resamples.mean(), values.mean(0) * mask, atol=1e-6)


def test_resamples_need_no_more_memory_for_more_prompts() -> None:
    mask = np.ones((300, 400), dtype=bool)
    sizes = [Resamples(prompts, mask, 0, 2**29).nbytes for prompts in (10, 10_000)]
    assert sizes[1] - sizes[0] == 4 * 200 * 9_990  # how often each is drawn, nothing else
    assert Resamples(10, mask, 0, 2**27).nbytes < 2**26 < sizes[0]
    assert Resamples(10, mask, 0, 1).count == 20


def test_resamples_of_some_prompts() -> None:
    """After an interruption only resamples count that have one of the prompts that are complete."""
    resamples = Resamples(40, np.ones((2, 2), dtype=bool), 0, 2**20)
    resamples.add(np.array([[[0, 1], [3, 2]]], dtype=np.float32))
    np.testing.assert_array_equal(resamples.inclusion(1), [[0, 0], [1, 0]])
    np.testing.assert_array_equal(resamples.mean(), [[0, 1], [3, 2]])


def test_the_mean_over_prompts_does_not_depend_on_batches() -> None:
    with running("demo", logits=True) as ready:
        graph = GraphModel(ready)
        prompts = task_prompts(ready, "induction", count=6).prompts
        found: list[np.ndarray] = []
        for memory in (2**30, 1):
            each: list[np.ndarray] = []
            Measuring(graph, "logit-difference", "eap", memory, lambda: None).attributions(prompts, each.append)
            found.append(np.concatenate(each))
        together, alone = found
    order = [np.argsort(values.reshape(6, -1)[:, :40].sum(1)) for values in (together, alone)]
    np.testing.assert_allclose(together[order[0]], alone[order[1]], atol=1e-4)
