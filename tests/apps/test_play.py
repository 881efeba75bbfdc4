# SPDX-License-Identifier: Apache-2.0
"""What is behind the page of ``pyro-bbb play``: drawings as pixels, the answers, the regression."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import pyro_bbb as bbb
from pyro_bbb.apps import digit_classifier as digits
from pyro_bbb.apps import main
from pyro_bbb.apps import play_answers as html
from pyro_bbb.apps.strokes import LONG, pixels, scribble
from tests._support.synthetic_digits import SCRIBBLES, STYLES, digit, quickly_trained, report

REAL = torch.tensor(load_digits().images, dtype=torch.float32) / 16  # [1797, 8, 8]


@pytest.fixture(scope="module")
def classifier():
    return quickly_trained()


def drawings(count=20):
    rng = np.random.default_rng(0)
    return [digit(number, i, rng) for number in STYLES for i in range(count)]


# --- from strokes to pixels ---


def left_edge(row):
    """Where ink begins in a row of blocks, in pixels of 32."""
    first = (row > 0.1).float().argmax()
    return 4 * float(first) + 4 * (1 - float(row[first]))


def test_drawings_look_like_the_real_digits():
    drawn = torch.stack([pixels(strokes) for strokes in drawings()]).view(-1, 8, 8)
    assert drawn.min() == 0 and drawn.max() == 1
    assert ((16 * drawn) % 1 == 0).all()  # pixels counted in blocks of 16
    real, ours = REAL.mean((1, 2)), drawn.mean((1, 2))
    assert abs(ours.mean() - real.mean()) < 0.01 and ours.std() < real.std()
    for edge in (0, 7):  # both touch top and bottom
        assert (REAL[:, edge].amax(-1) > 0).all() and (drawn[:, edge].amax(-1) > 0).all()
    leaning = [[left_edge(x[0]) - left_edge(x[7]) for x in images] for images in (REAL, drawn)]
    for lean in leaning:  # the leftmost ink of the top is above that of the bottom
        assert abs(np.mean(lean)) < 1 and np.std(lean) < 2


def test_place_and_size_on_the_pad_do_not_matter():
    for strokes in drawings(2):
        moved = [0.5 * stroke + [0.3, 0.1] for stroke in strokes]
        assert (pixels(moved) - pixels(strokes)).abs().max() < 0.1


def test_a_dot_and_a_straight_line_have_pixels():
    for strokes in ([np.full((2, 2), 0.5)], [np.array([[0.2, 0.5], [0.8, 0.5]])]):
        ink = pixels(strokes)
        assert ink.isfinite().all() and ink.sum() > 0


def test_scribbles_are_longer_than_digits():
    rng = np.random.default_rng(0)

    def length(strokes):
        diagonal = np.hypot(*np.ptp(np.concatenate(strokes), axis=0))
        return sum(np.hypot(*np.diff(s, axis=0).T).sum() for s in strokes) / diagonal

    longest = max(length(strokes) for strokes in drawings())
    assert longest < LONG < min(length(scribble(rng)) for _ in range(50))


# --- the classifier ---


@pytest.mark.slow
def test_drawn_digits_are_recognised_and_scribbles_refused(classifier):
    shares = report(classifier)
    assert shares["recognised"] > 0.95 and shares["answered"] > 0.8
    assert shares["right where answered"] > 0.98 and shares["refused"] > 0.85
    assert sum(name.startswith("refused: ") for name in shares) == len(SCRIBBLES)


@pytest.mark.slow
def test_answers_are_those_of_predict_also_when_saved(classifier, tmp_path):
    x = torch.stack([pixels(strokes) for strokes in drawings(1)])
    plain = bbb.predict(classifier.model, classifier.guide, x, num_samples=100, seed=0)
    pruned = bbb.prune(classifier.guide, 0.75)
    few = bbb.predict(classifier.model, pruned, x, num_samples=100, seed=0)
    classifier.save(tmp_path)
    for model in (classifier, digits.open_saved(tmp_path)):
        assert torch.equal(model.predict(x).sample_log_probs, plain.sample_log_probs)
        assert torch.equal(model.predict(x, pruned=True).sample_log_probs, few.sample_log_probs)
    _, (held_out, _) = digits._digits()
    refused = classifier.predict(held_out).refuse(classifier.threshold).double().mean()
    assert abs(float(refused) - 0.05) <= 1 / len(held_out)


def test_other_models_are_refused_and_kept(capsys, tmp_path):
    model = bbb.BayesianModel(bbb.BayesianMLP([64, 10]), bbb.likelihoods.Categorical(), num_data=9)
    bbb.save(tmp_path, model, bbb.guides.make("delta", model))
    before = (tmp_path / "spec.json").read_bytes()
    assert main(["play", "--model", str(tmp_path), "--port", "0"]) == 2
    assert "must hold networks that `play` has saved" in capsys.readouterr().err
    assert (tmp_path / "spec.json").read_bytes() == before


def test_rotated_digits_are_in_no_training():
    (seen, _), (x, y) = digits._digits()
    shown = digits.unseen_digits()
    assert list(shown) == [str(label) for label in range(10)]
    for name, pictured in shown.items():
        assert not (seen == pictured).all(1).any()
        assert y[(x == pictured).all(1)].tolist() == [int(name)]


# --- what is shown ---


def answer(probs):
    """Return a prediction by networks of these probabilities."""
    return bbb.ClassificationPrediction(torch.tensor(probs).log()[:, None])


def test_the_words_follow_the_threshold():
    prediction = answer([[0.7, 0.3], [0.5, 0.5]])
    assert '<div class="verdict">0</div>' in html.answer(prediction, 0.59, votes=False)
    refused = html.answer(prediction, 0.6, votes=False)
    assert "I don't know" in refused and "best guess 0, with probability 0.60" in refused


def test_votes_are_counted_and_entropies_told():
    prediction = answer([[0.9, 0.1], [0.2, 0.8]])
    text = html.answer(prediction, 0.5, votes=True)
    assert text.count('<span class="count">1</span>') == 2
    assert f'<b class="aleatoric">{float(prediction.aleatoric):.2f}</b>' in text
    assert f'<b class="epistemic">{float(prediction.epistemic):.2f}</b>' in text


def test_a_click_is_where_the_point_is_drawn():
    for x, y in ((-1.0, 1.0), (0.25, -0.5)):
        body = html.plot([(x, y)], None)
        place = [float(body.split(f'{name}="')[1].split('"')[0]) for name in ("cx", "cy")]
        assert html.point_at(*place) == pytest.approx((x, y), abs=1e-3)
    assert html.point_at(0, 0) is None


# --- the command ---


def test_a_port_that_is_taken_is_said(capsys, tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["play", "--model", str(tmp_path), "--port", str(port)]) == 2
    assert f"cannot answer at 127.0.0.1:{port}" in capsys.readouterr().err
