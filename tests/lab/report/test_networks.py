"""Cut networks beside other methods: read from their records, told in a table, a sentence and the leading figure."""

import json

import pytest

from cpnorm.lab.report import RecordError, build, write_page
from cpnorm.lab.report.document import Explorer, Grid
from cpnorm.lab.report.networks import read_cuts, section, sentence
from report_cases import blocks, parsed

RECORD = {"benchmark": "compression_accuracy", "network": "resnet18", "data": "cifar10", "smoke": False}


def record(method, share, accuracy, **more):
    sizes = {"share": share, "parameters": round(11_173_962 * share), "accuracy": accuracy}
    return RECORD | sizes | {"method": method} | more


LINES = [
    record("dense", 1.0, 94.0),
    record("cpnorm", 0.05, 92.5),
    record("cpnorm", 0.05, 93.4, seed=0, finetuning={"epochs": 15}),
    record("cpnorm", 0.05, 93.6, seed=1, finetuning={"epochs": 15}),
    record("svd", 0.05, 22.0),
    record("svd", 0.1, 55.0),
    record("svd", 0.1, 1.0, smoke=True),
    {"benchmark": "another"},
]


def write(folder, lines):
    (folder / "networks").mkdir(parents=True, exist_ok=True)
    (folder / "networks/a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_table_of_every_method_by_share(tmp_path):
    part = section(read_cuts(write(tmp_path, LINES)))
    headline, grid = blocks([part], Grid)
    assert [[cell.text for cell in row] for row in headline.rows] == [
        ["ResNet-18, CIFAR-10", "5 %", "0.56 M", "92.50", "22.00, SVD", "94.00", "93.50 ± 0.14", "–", "–"]
    ]
    assert grid.caption == "ResNet-18 on CIFAR-10"
    texts = [[cell.text for cell in row] for row in grid.rows]
    assert texts == [
        ["dense", "100 %", "11.17 M", "94.00", "–", "–", "–", "0", "–"],
        ["SVD", "10 %", "1.12 M", "55.00", "−39.00", "–", "–", "0", "–"],
        ["cpnorm", "5 %", "0.56 M", "92.50", "−1.50", "93.50 ± 0.14", "−0.50", "2", "–"],
        ["SVD", "5 %", "0.56 M", "22.00", "−72.00", "–", "–", "0", "–"],
    ]


def test_one_sentence_and_the_leading_figure(tmp_path):
    found = sentence(read_cuts(write(tmp_path, LINES)))
    assert found == (
        "Cut to 5 % of its parameters, a trained ResNet-18 keeps 92.5 of 94.0 % without training and 93.5 % after "
        "fine-tuning; other methods keep, without training: SVD 22.0 %."
    )
    document = build(tmp_path)
    assert document.sentences[-1] == found
    assert "<title>resnet18, cpnorm, 5 %, fine-tuned: 93.50 %" in document.lead.svg
    assert sentence(read_cuts(write(tmp_path, LINES[:2]))) == ""  # nothing was fine-tuned


def test_the_explorer_offers_cut_networks(tmp_path):
    """Budgets by method, before and after fine-tuning; the page's ids stay unique beside the section of networks."""
    document = build(write(tmp_path, LINES))
    (explorer,) = blocks(document.sections, Explorer)
    (network,) = explorer.networks
    assert network["name"] == "ResNet-18 on CIFAR-10"
    assert [(c["name"], c["cut"], c["tuned"], c["peer"]) for c in network["cuts"]] == [
        ("dense", 94.0, None, True),
        ("SVD, 10 %", 55.0, None, True),
        ("cpnorm, 5 %", 92.5, 93.5, False),
        ("SVD, 5 %", 22.0, None, True),
    ]
    page = parsed(write_page(document, tmp_path / "r.html").read_text())
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_of_two_files_with_a_cut_the_last_one_counts(tmp_path):
    write(tmp_path, LINES)
    newer = [record("dense", 1.0, 94.0), record("cpnorm", 0.05, 93.0)]
    (tmp_path / "networks/b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in newer))
    found = {(cut.method, cut.share): (cut.untrained, cut.tuned) for cut in read_cuts(tmp_path)}
    assert found["cpnorm", 0.05] == ([93.0], [])
    assert found["svd", 0.05] == ([22.0], [])


def test_training_without_labels_is_no_fine_tuning(tmp_path):
    distilled = [record("cpnorm", 0.05, 93.0 + seed, seed=seed, finetuning={"label": "distilled"}) for seed in (0, 1)]
    write(tmp_path, LINES[:2] + distilled)
    assert sentence(read_cuts(tmp_path)) == ""
    _, grid = blocks([section(read_cuts(tmp_path))], Grid)
    assert [cell.text for cell in grid.rows[1]][5:] == ["–", "–", "0", "93.50 ± 0.71"]
    (tmp_path / "networks/b.jsonl").write_text(json.dumps(record("cpnorm", 0.05, 92.6)) + "\n")  # cut again
    (cut,) = (cut for cut in read_cuts(tmp_path) if cut.method == "cpnorm")
    assert (cut.untrained, cut.distilled) == ([92.6], [93.0, 94.0])


def test_the_leading_figure_has_our_smallest_networks_and_no_trials(tmp_path):
    line = {"seed": 0, "final": 90.0, "best": 91.0, "weights": 25_000, "curve": {"test_accuracy": []}}
    configs = {"25k": {"data": "cifar10", "norm": "cp"}, "trial": {"data": "cifar10", "norm": "cp", "validation": 5000}}
    (tmp_path / "records").mkdir()
    lines = [{**line, "table": "r", "row": f"r/{name}", "config": config} for name, config in configs.items()]
    (tmp_path / "records/r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lead = build(write(tmp_path, LINES)).lead.svg
    assert "<title>r/25k: 90.00 %" in lead
    assert "r/trial" not in lead


def test_methods_that_look_at_more_images_have_names_of_their_own(tmp_path):
    """They stand in the table of their network, and not beside ours in the first table."""
    lines = [record(method, 0.05, accuracy) for method, accuracy in (("cpnorm", 93.0), ("svd", 30.0))]
    more = [{**line, "calibration_images": 8192} for line in lines]
    usual = [{**line, "calibration_images": 1024} for line in LINES]
    headline, grid = blocks([section(read_cuts(write(tmp_path, usual + more)))], Grid)
    assert [row[3].text for row in headline.rows] == ["92.50"]
    assert headline.rows[0][4].text == "22.00, SVD"
    names = {row[0].text: row[3].text for row in grid.rows if row[1].text == "5 %"}
    assert names == {"cpnorm": "92.50", "SVD": "22.00", "cpnorm, 8,192 images": "93.00", "SVD, 8,192 images": "30.00"}
    (explorer,) = blocks(build(tmp_path).sections, Explorer)
    assert {cut["name"]: cut["peer"] for cut in explorer.networks[0]["cuts"] if "images" in cut["name"]} == {
        "cpnorm, 8,192 images, 5 %": False,
        "SVD, 8,192 images, 5 %": True,
    }


def test_without_records_there_is_no_section(tmp_path):
    assert read_cuts(tmp_path) == []
    assert section([]) is None
    assert sentence([]) == ""


@pytest.mark.parametrize("odd", [{"accuracy": 101}, {"parameters": 10**39}, {"share": None}, {"network": 3}])
def test_an_odd_record_is_named(tmp_path, odd):
    with pytest.raises(RecordError, match=r"a\.jsonl, line 2: expected"):
        read_cuts(write(tmp_path, [LINES[0], LINES[1] | odd]))
