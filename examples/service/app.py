# SPDX-License-Identifier: Apache-2.0
"""A web service that answers for a saved model, says how sure it is, and refuses where it is not.

    python examples/service/train.py model
    PYRO_BBB_MODEL=model uvicorn --app-dir examples/service --factory app:create_app

README.md beside this file tells what it expects and answers.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, FailFast, Field, model_validator
from torch import Tensor

import pyro_bbb as bbb

QUANTILES = (0.05, 0.5, 0.95)  # the interval of 90 %
WITH_QUANTILES = (bbb.likelihoods.Gaussian, bbb.likelihoods.HeteroscedasticGaussian)

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Row = Annotated[list[Number], FailFast()]  # the first error is enough, each takes a kilobyte


# --- what is asked and answered ---


class Batch(BaseModel):
    """Inputs, each as the list of its numbers in the order of memory."""

    inputs: Annotated[list[Row], FailFast(), Field(min_length=1)]
    max_rows: ClassVar[int]

    @model_validator(mode="before")
    @classmethod
    def check_size(cls, content: Any) -> Any:
        """Check fields and number of rows, before any number is looked at."""
        if isinstance(content, dict):
            for name in content.keys() - {"inputs"}:
                raise ValueError(f"field {name[:50]!r} is not permitted")
            rows = content.get("inputs")
            if isinstance(rows, list) and len(rows) > cls.max_rows:
                raise ValueError(f"expected at most {cls.max_rows} inputs, got {len(rows)}")
        return content


class Answer(BaseModel):
    """Of one input: entropies in nats for classes, standard deviations for real targets."""

    aleatoric: float | list[float]
    epistemic: float | list[float]
    refused: bool


class ClassAnswer(Answer):
    """The most probable class."""

    prediction: int
    label: str | None
    probabilities: list[float]


class TargetAnswer(Answer):
    """The expected targets, and the central 90 % of each where the likelihood is Normal."""

    prediction: list[float]
    std: list[float]
    interval: list[tuple[float, float]] | None


class Answers(BaseModel):
    """One answer per input, in their order."""

    answers: list[ClassAnswer | TargetAnswer]


class Health(BaseModel):
    """What is being served."""

    status: str
    input_shape: list[int]
    num_samples: int


# --- settings ---


@dataclass(frozen=True)
class Settings:
    """Read from environment variables ``PYRO_BBB_<NAME>``.

    Args:
        model: folder that `pyro_bbb.save` wrote, with ``input_shape`` in its metadata, and for
            classes perhaps ``labels``.
        threshold: refused are classes of at most this probability, and targets of at least this
            standard deviation; by default none.
        num_samples: networks drawn from the posterior.
        seed: of the draws.
        max_rows: inputs of one request.
        max_bytes: size of a request.
    """

    model: Path
    threshold: float | None = None
    num_samples: int = 100
    seed: int = 0
    max_rows: int = 1024
    max_bytes: int = 4 * 2**20

    @classmethod
    def from_environment(cls) -> Settings:
        """Return the settings of this process.

        Raises:
            KeyError: ``PYRO_BBB_MODEL`` is not set.
            ValueError: another one is not a number.
        """
        kinds = {field.name: int for field in fields(cls)} | {"model": Path, "threshold": float}
        names = {name: f"PYRO_BBB_{name.upper()}" for name in kinds}
        given = {name: kinds[name](os.environ[v]) for name, v in names.items() if v in os.environ}
        if "model" not in given:
            raise KeyError("set PYRO_BBB_MODEL to the folder of a saved model")
        return cls(**given)


# --- the model ---


class Served:
    """Networks drawn once from a saved posterior, and their answers."""

    def __init__(self, settings: Settings) -> None:
        loaded = bbb.load(settings.model)
        if "input_shape" not in loaded.metadata:
            raise ValueError(f"{settings.model} must have input_shape in its metadata")
        self.settings = settings
        self.shape: list[int] = list(loaded.metadata["input_shape"])
        self.labels: list[str] | None = loaded.metadata.get("labels")
        normal = isinstance(loaded.model.likelihood, WITH_QUANTILES)
        self.ensemble = bbb.to_ensemble(
            *loaded,
            num_samples=settings.num_samples,
            seed=settings.seed,
            quantiles=QUANTILES if normal else (),
        )
        self.dtype = next(iter(self.ensemble.drawn.weights().values())).dtype
        found = self.run(torch.zeros(1, *self.shape, dtype=self.dtype))  # or fail at the start
        if next(iter(found.values())).dim() != 2:
            raise ValueError("expected a model of one class, or of one row of targets, per input")

    def run(self, x: Tensor) -> dict[str, Tensor]:
        """Return the networks' answer; calls may come from several threads."""
        with torch.inference_mode():
            found: dict[str, Tensor] = self.ensemble(x)
        return found

    def answer(self, rows: list[list[float]]) -> list[ClassAnswer | TargetAnswer]:
        """One answer per row, or an error 422."""
        x = self.checked(rows)
        try:
            found = self.run(x)
        except ValueError as error:
            raise HTTPException(422, f"the answer is not finite: {error}") from error
        require(all(value.isfinite().all() for value in found.values()), "the answer is not finite")
        return self.of_classes(**found) if "probs" in found else self.of_targets(**found)

    def checked(self, rows: list[list[float]]) -> Tensor:
        """Return the rows as inputs of the network."""
        length = math.prod(self.shape)
        for i, row in enumerate(rows):
            expected = f"expected {length} numbers, for shape {self.shape}"
            require(len(row) == length, f"input {i}: {expected}, got {len(row)}")
        x = torch.tensor(rows, dtype=torch.float64).to(self.dtype).reshape(-1, *self.shape)
        require(x.isfinite().all(), f"inputs must be finite as {self.dtype}")
        return x

    def of_classes(self, probs: Tensor, aleatoric: Tensor, epistemic: Tensor) -> list[Any]:
        """Answers from probabilities and entropies."""
        confidence, best = probs.max(-1)
        threshold = self.settings.threshold
        refused = confidence <= (-1.0 if threshold is None else threshold)
        columns = (best, probs, aleatoric, epistemic, refused)
        return [
            ClassAnswer(
                prediction=k,
                label=self.labels[k] if self.labels else None,
                probabilities=p,
                aleatoric=a,
                epistemic=e,
                refused=r,
            )
            for k, p, a, e, r in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def of_targets(
        self,
        mean: Tensor,
        std: Tensor,
        aleatoric_std: Tensor,
        epistemic_std: Tensor,
        quantiles: Tensor | None = None,
    ) -> list[Any]:
        """Answers from moments and quantiles."""
        threshold = self.settings.threshold
        refused = (std >= (math.inf if threshold is None else threshold)).any(-1)
        ends = [None] * len(mean) if quantiles is None else quantiles[..., [0, -1]].tolist()
        columns = (mean, std, aleatoric_std, epistemic_std, refused)
        return [
            TargetAnswer(prediction=m, std=s, aleatoric=a, epistemic=e, refused=r, interval=i)
            for m, s, a, e, r, i in zip(*(column.tolist() for column in columns), ends, strict=True)
        ]


def require(condition: Any, message: str) -> None:
    """Answers 422 with the message unless the condition holds."""
    if not condition:
        raise HTTPException(422, message)


# --- the service ---


class LimitSize:
    """Refuses requests whose body is too long, or of unknown length, before reading it."""

    def __init__(self, app: Any, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Hands on to the application, or answers 411 or 413."""
        if scope["type"] == "http" and scope["method"] == "POST":
            length = dict(scope["headers"]).get(b"content-length", b"")
            status = 411 if not length.isdigit() else 413 if int(length) > self.max_bytes else None
            if status:
                message = f"expected a body of known length, at most {self.max_bytes} bytes"
                await JSONResponse({"detail": message}, status)(scope, receive, send)
                return
        await self.app(scope, receive, send)


async def explain(_: Request, error: Exception) -> JSONResponse:
    """Answers 422 with places and reasons, and without the values, which JSON may not have."""
    found = error.errors() if isinstance(error, RequestValidationError) else []
    detail = [{"loc": list(each["loc"]), "msg": each["msg"][:200]} for each in found[:10]]
    return JSONResponse({"detail": detail}, 422)


def create_app(settings: Settings | None = None) -> FastAPI:
    """Return the application, with the model loaded.

    Args:
        settings: by default those of the environment.
    """
    settings = settings or Settings.from_environment()
    served = Served(settings)
    app = FastAPI(title="pyro_bbb", version=bbb.__version__)
    app.add_middleware(LimitSize, max_bytes=settings.max_bytes)
    app.add_exception_handler(RequestValidationError, explain)

    @app.get("/health")
    def health() -> Health:
        return Health(
            status="ok", input_shape=served.shape, num_samples=served.settings.num_samples
        )

    class Limited(Batch):
        max_rows = settings.max_rows

    def predict(batch: Batch) -> Answers:
        return Answers(answers=served.answer(batch.inputs))

    predict.__annotations__["batch"] = Limited
    app.post("/predict")(predict)

    return app
