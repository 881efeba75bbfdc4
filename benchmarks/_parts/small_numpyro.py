# SPDX-License-Identifier: Apache-2.0
"""The same training by NumPyro: `AutoNormal`, all steps of a run in one compiled scan."""

from collections.abc import Callable
from typing import Any


def numpyro_run(run: Any, noise: float, *, cold: bool = False) -> Callable[[], None]:
    """A function that trains for the run's steps; it is compiled before, or in each call."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    x, y = (jnp.asarray(part.numpy()) for part in run.data())
    pairs = list(zip(run.sizes[:-1], run.sizes[1:], strict=True))

    def model(x: Any, y: Any) -> None:
        weight = x.shape[0] / run.rows
        for number, (n_in, n_out) in enumerate(pairs):
            with numpyro.handlers.scale(scale=weight):
                prior = dist.Normal(0.0, 1.0)
                w = numpyro.sample(f"w{number}", prior.expand([n_in, n_out]).to_event(2))
                b = numpyro.sample(f"b{number}", prior.expand([n_out]).to_event(1))
            x = (jax.nn.relu(x) if number else x) @ w + b
        if run.sizes[-1] > 1:
            numpyro.sample("obs", dist.Categorical(logits=x).to_event(1), obs=y)
        else:
            numpyro.sample("obs", dist.Normal(x, noise).to_event(2), obs=y)

    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-4), Trace_ELBO())
    full = run.rows // run.batch * run.batch if run.rows > run.batch else run.rows

    def step(state: Any, rows: Any) -> Any:
        return svi.update(state, x[rows], y[rows])

    @jax.jit
    def train(state: Any, key: Any) -> Any:
        epochs = -(-run.num_steps * run.batch // full) if full > run.batch else run.num_steps
        keys = jax.random.split(key, epochs)
        order = jax.vmap(lambda k: jax.random.permutation(k, run.rows)[:full])(keys)
        rows = order.reshape(-1, min(run.batch, run.rows))[: run.num_steps]
        return jax.lax.scan(step, state, rows)[0]

    key = jax.random.PRNGKey(0)
    state = svi.init(key, x[: run.batch], y[: run.batch])

    def repeat() -> None:
        if cold:
            jax.clear_caches()
        jax.block_until_ready(train(state, key))

    if not cold:
        repeat()
    return repeat
