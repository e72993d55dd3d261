"""Pairs that nobody chose: mutants of programs by other people.

The sources are copied out of the installed packages when the tests run, so that they are user code
there (`copied.py`, beside a small `main.py` that uses them).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from collections.abc import Iterator

import fp_mutation
from fp_harness import Pair, Program


@dataclasses.dataclass(frozen=True)
class Origin:
    """A source file of an installed package, the parts to mutate, and a program using them."""

    package: str
    file: str
    names: tuple[str, ...]
    main: str
    mutants: int = 16

    def text(self) -> str:
        spec = importlib.util.find_spec(self.package)
        assert spec is not None and spec.origin is not None
        return pathlib.Path(spec.origin).parent.joinpath(self.file).read_text()

    def program(self, text: str) -> Program:
        return Program({"main.py": _HEADER + self.main, "copied.py": text})


_HEADER = (
    "import copied\nimport jax\nimport jax.numpy as jnp\nimport optax\nfrom flax import nnx\n\n\n"
)

ORIGINS = (
    Origin(
        "jax", "_src/nn/functions.py",
        ("squareplus", "softplus", "soft_sign", "log_sigmoid", "elu", "leaky_relu", "celu", "gelu",
         "glu", "standardize", "_softmax", "_softmax_jvp", "log_softmax", "one_hot", "_one_hot",
         "hard_silu", "relu6", "log1mexp"),
        """
def loss(x):
    total = copied.squareplus(x) + copied.soft_sign(x) + copied.elu(x) + copied.leaky_relu(x)
    total += copied.celu(x) + copied.gelu(x) + copied.gelu(x, approximate=False)
    total += copied.standardize(x) + copied.softmax(x) + copied.log_softmax(x)
    total += copied.hard_silu(x) + copied.softplus(x) + copied.log_sigmoid(x)
    total += copied.one_hot(jnp.arange(4), 4) + copied.log1mexp(x)
    return total.sum() + copied.glu(x).sum()


def program():
    return {"fun": jax.value_and_grad(loss), "args": (jnp.ones((4, 4)),)}
""",
        68,
    ),
    Origin(
        "jax", "_src/scipy/special.py",
        ("gammaln", "betaln", "factorial", "digamma", "entr", "logit", "xlogy", "xlog1py", "zeta",
         "ndtr", "_ndtr", "ndtri", "_ndtri", "log_ndtr", "_log_ndtr_lower",
         "_log_ndtr_asymptotic_series", "i0e", "rel_entr", "kl_div", "spence", "_spence_poly"),
        """
def program():
    def fun(x):
        return (copied.betaln(x, x) + copied.entr(x) + copied.logit(x) + copied.xlogy(x, x)
                + copied.xlog1py(x, x) + copied.ndtr(x) + copied.log_ndtr(x) + copied.rel_entr(x, x)
                + copied.kl_div(x, x) + copied.ndtri(x) + copied.spence(x))

    return {"fun": fun, "args": (jnp.full(5, 0.3),)}
""",
        44,
    ),
    Origin(
        "jax", "_src/scipy/stats/norm.py", ("logpdf", "pdf", "cdf", "logcdf", "sf", "logsf"),
        """
def program():
    return {"fun": lambda x: copied.logpdf(x, 1.0) + copied.sf(x) + copied.cdf(x, 0.1, 2.0),
            "args": (jnp.full(5, 0.3),)}
""",
        16,
    ),
    Origin(
        "optax", "_src/alias.py",
        ("adam", "adamw", "lion", "yogi", "lamb", "novograd", "rmsprop", "radam", "adabelief"),
        """
TX = optax.chain(
    copied.adamw(1e-3), copied.lion(1e-3), copied.yogi(1e-3), copied.lamb(1e-3),
    copied.rmsprop(1e-3, momentum=0.9), copied.novograd(1e-3), copied.radam(1e-3),
    copied.adabelief(1e-3))


def step(params, state, grads):
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def program():
    params = {"w": jnp.ones((2, 3))}
    return {"fun": step, "args": (params, TX.init(params), params)}
""",
        40,
    ),
    Origin(
        "optax", "_src/transform.py",
        ("scale_by_adam", "scale_by_lion", "scale_by_rms", "scale_by_yogi", "scale_by_radam",
         "scale_by_schedule", "trace", "ema", "centralize", "scale_by_trust_ratio",
         "add_decayed_weights", "scale_by_belief", "apply_every", "scale", "scale_by_sign"),
        """
def step(tx_state, grads, params):
    return TX.update(grads, tx_state, params)


TX = optax.chain(
    copied.scale_by_adam(), copied.scale_by_lion(), copied.scale_by_rms(), copied.scale_by_yogi(),
    copied.scale_by_radam(), copied.scale_by_trust_ratio(), copied.add_decayed_weights(0.1),
    copied.scale_by_belief(), copied.apply_every(3), copied.scale(0.3), copied.centralize())


def program():
    params = {"w": jnp.ones((2, 3))}
    return {"fun": step, "args": (TX.init(params), params, params)}
""",
        40,
    ),
    Origin(
        "flax", "linen/normalization.py",
        ("_compute_stats", "_normalize", "BatchNorm", "LayerNorm", "GroupNorm", "RMSNorm",
         "_abs_sq", "_canonicalize_axes"),
        """
class Model(copied.nn.Module if hasattr(copied, "nn") else copied.Module):
    @copied.compact
    def __call__(self, x):
        x = copied.BatchNorm(use_running_average=False)(x)
        x = copied.GroupNorm(num_groups=2)(copied.LayerNorm()(x))
        return copied.RMSNorm()(x)


def program():
    model = Model()
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((3, 4)))

    def fun(variables, x):
        return model.apply(variables, x, mutable=["batch_stats"])

    return {"fun": fun, "args": (variables, jnp.ones((3, 4)))}
""",
        51,
    ),
    Origin(
        "flax", "linen/recurrent.py", ("LSTMCell", "GRUCell", "SimpleCell", "MGUCell", "RNN"),
        """
class Model(copied.Module if hasattr(copied, "Module") else copied.nn.Module):
    @copied.compact
    def __call__(self, x):
        x = copied.RNN(copied.LSTMCell(4))(x)
        x = copied.RNN(copied.GRUCell(4))(x)
        return copied.RNN(copied.SimpleCell(4), reverse=True)(x)


def program():
    model = Model()
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 3, 4)))
    return {"fun": model.apply, "args": (variables, jnp.ones((2, 3, 4)))}
""",
        44,
    ),
    Origin(
        "flax", "nnx/nn/linear.py", ("Linear", "LinearGeneral", "Conv", "Embed", "Einsum"),
        """
class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = copied.Embed(10, 4, rngs=rngs)
        self.conv = copied.Conv(4, 4, kernel_size=(3,), rngs=rngs)
        self.linear = copied.Linear(4, 6, rngs=rngs)
        self.general = copied.LinearGeneral(6, (2, 3), rngs=rngs)

    def __call__(self, t):
        return self.general(self.linear(self.conv(self.embed(t))))


def forward(graph, state, t):
    return nnx.merge(graph, state)(t)


def program():
    graph, state = nnx.split(Model(nnx.Rngs(0)))
    return {"fun": forward, "args": (graph, state, jnp.zeros((2, 5), "int32"))}
""",
        44,
    ),
    Origin(
        "jax", "example_libraries/stax.py",
        ("Dense", "GeneralConv", "BatchNorm", "elementwise", "serial", "FanInSum", "FanOut",
         "_pooling_layer", "_normalize_by_window_size", "AvgPool", "MaxPool", "parallel"),
        """
INIT, APPLY = copied.serial(
    copied.Conv(4, (3, 3), padding="SAME"), copied.BatchNorm(), copied.Relu,
    copied.MaxPool((2, 2)), copied.AvgPool((2, 2)),
    copied.FanOut(2), copied.parallel(copied.Identity, copied.Softplus), copied.FanInSum,
    copied.Flatten, copied.Dense(3), copied.LogSoftmax)


def loss(params, x):
    return APPLY(params, x).sum()


def program():
    params = jax.eval_shape(lambda k: INIT(k, (2, 8, 8, 3))[1], jax.random.key(0))
    return {"fun": jax.grad(loss), "args": (params, jnp.ones((2, 8, 8, 3)))}
""",
        40,
    ),
)  # fmt: skip


def pairs(seed: int = 0) -> Iterator[Pair]:
    """Each origin against its mutants; lowering shows whether a mutant is another program."""
    for number, origin in enumerate(ORIGINS):
        text = origin.text()
        first = origin.program(text)
        yield Pair(f"{origin.file}: rewritten without comments", first, origin.program(_bare(text)),
                   harmless=True)  # fmt: skip
        for mutant in fp_mutation.mutants(text, origin.names, origin.mutants, seed + number):
            yield Pair(f"{origin.file}, {mutant.what}", first, origin.program(mutant.text))


def _bare(text: str) -> str:
    """The same code without comments, docstrings and layout."""
    import ast

    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(ast.fix_missing_locations(tree))
