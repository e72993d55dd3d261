# ruff: noqa: E501 (programs, one to a line)
"""Pairs of programs written by hand: one edit each, of the kinds that people make."""

from __future__ import annotations

from collections.abc import Iterator

from fp_harness import Pair, Program

_STEP = Program(
    {
        "main.py": '''\
"""A training step over two layers."""
import dataclasses
import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
from helpers import scale_by
from package import layers
from package.inner import constants

RATE = 0.1
TABLE = np.arange(4.0)
OPTIONS = {"clip": 1.0, "names": ["a", "b"]}


@dataclasses.dataclass
class Config:
    width: int = 4
    slope: float = 0.2
    activation: str = "tanh"


CONFIG = Config()


class Schedule:
    """Decays."""

    factor = 0.5

    def __init__(self, start):
        self.start = start
        self.log = []

    def __call__(self, step):
        return self.start * self.factor**step

    def describe(self):
        return f"starts at {self.start}"


schedule = Schedule(0.3)


def make_activation(slope, bias=0.0):
    def activation(x):
        return jnp.where(x > 0, x, slope * x) + bias

    return activation


activation = make_activation(0.01)
halve = functools.partial(scale_by, factor=0.5)


def clip(x, limit=1.0, *, low=-1.0):
    return jnp.clip(x, low, limit)


def loss(params, x):
    """The loss."""
    h = layers.dense(params["w"], x)
    h = activation(h) + constants.OFFSET
    h = halve(clip(h)) * CONFIG.slope + TABLE
    return helpers.reduce(h) * OPTIONS["clip"]


def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    params = jax.tree.map(lambda p, g: p - RATE * schedule(2) * g, params, grads)
    return params, value


def unused(x):
    return x + 1


def program():
    return {"fun": step, "args": ({"w": jnp.ones((4, 4))}, jnp.ones((2, 4)))}
''',
        "helpers.py": """\
import jax.numpy as jnp


def reduce(x):
    # adds up
    return jnp.sum(square(x))


def square(x):
    return x * x


def scale_by(x, factor):
    return x * factor


def not_called(x):
    return x - 3
""",
        "package/__init__.py": "",
        "package/layers.py": """\
from .inner.ops import matmul


def dense(w, x):
    return matmul(x, w)
""",
        "package/inner/__init__.py": "",
        "package/inner/ops.py": "def matmul(a, b):\n    return a @ b\n",
        "package/inner/constants.py": "OFFSET = 0.5\nUNUSED = 1\n",
    }
)

# (name, text, its replacement, file)
_STEP_CHANGES = [
    ("a constant in the step", "step(params, x):\n    value", "step(params, x):\n    x = x * 2\n    value", "main.py"),
    ("a global number", "RATE = 0.1", "RATE = 0.2", "main.py"),
    ("a global array", "np.arange(4.0)", "np.arange(4.0) + 1", "main.py"),
    ("a value in a global dictionary", '"clip": 1.0', '"clip": 2.0', "main.py"),
    ("a helper's helper in another module", "return x * x", "return x * x * x", "helpers.py"),
    ("an operator in another module", "x * factor", "x / factor", "helpers.py"),
    ("which function of a library is called", "jnp.sum(", "jnp.mean(", "helpers.py"),
    ("a module of a package, by relative import", "a @ b", "(a @ b) * 3", "package/inner/ops.py"),
    ("a constant in a nested package", "OFFSET = 0.5", "OFFSET = 0.25", "package/inner/constants.py"),
    ("a dataclass field's default", "slope: float = 0.2", "slope: float = 0.3", "main.py"),
    ("a dataclass instance's field", "CONFIG = Config()", "CONFIG = Config(slope=0.7)", "main.py"),
    ("a class attribute", "factor = 0.5\n", "factor = 0.25\n", "main.py"),
    ("an instance attribute", "Schedule(0.3)", "Schedule(0.4)", "main.py"),
    ("a method of a callable object", "self.factor**step", "self.factor * step", "main.py"),
    ("a closed-over number", "make_activation(0.01)", "make_activation(0.02)", "main.py"),
    ("a default of an enclosing function", "slope, bias=0.0", "slope, bias=0.1", "main.py"),
    ("the code of a closure", "slope * x)", "slope * x * x)", "main.py"),
    ("a partial's keyword", "factor=0.5)", "factor=0.75)", "main.py"),
    ("a positional default", "limit=1.0", "limit=0.5", "main.py"),
    ("a keyword-only default", "low=-1.0", "low=-0.5", "main.py"),
    ("a lambda inside", "p - RATE", "p + RATE", "main.py"),
    ("which transformation is used", "value, grads = jax.value_and_grad(loss)(params, x)",
     "value, grads = loss(params, x), params", "main.py"),
    ("a name rebound at the end of the module", "def program():", "activation = jnp.tanh\n\n\ndef program():", "main.py"),
    ("a function wrapped at the end of the module", "def program():", "loss = jax.checkpoint(loss)\n\n\ndef program():", "main.py"),
    ("a method replaced from outside", "def program():",
     "Schedule.__call__ = lambda self, step: self.start\n\n\ndef program():", "main.py"),
    ("an attribute set from outside", "def program():", "schedule.factor = 3.0\n\n\ndef program():", "main.py"),
    ("a helper replaced in its module", "def program():", "helpers.square = lambda x: x + 1\n\n\ndef program():", "main.py"),
    ("an array changed in place", "def program():", "TABLE[1] = 7.0\n\n\ndef program():", "main.py"),
    ("a decorator on a helper", "def reduce(x):", "def twice(f):\n    return lambda x: f(f(x))\n\n\ndef reduce(x):\n    return twice(square)(x).sum()\n\n\ndef reduce_(x):", "helpers.py"),
    ("the structure of the result", "return params, value", "return {'params': params, 'value': value}", "main.py"),
    ("a jit option", '"args": (', '"options": {"keep_unused": True, "donate_argnums": 0}, "args": (', "main.py"),
    ("a helper's default array", "def scale_by(x, factor):\n    return x * factor", "def scale_by(x, factor, extra=jnp.full(4, 2.0)):\n    return x * factor * extra", "helpers.py"),
    ("a nested function's constant", "return x * x", "def inner(y):\n        return y * 3.0\n\n    return inner(x)", "helpers.py"),
    ("a branch on a global", "return x * x", "return x * x if THING else x", "helpers.py"),
]  # fmt: skip

_STEP_HARMLESS = [
    ("a comment", "# adds up", "# adds everything up, slowly", "helpers.py"),
    ("another docstring", '"""The loss."""', '"""Another text about the loss."""', "main.py"),
    ("a module docstring", '"""A training step over two layers."""', '"""Other."""\n\n# more\n', "main.py"),
    ("a docstring where there was none", "def square(x):\n", 'def square(x):\n    """Squares."""\n', "helpers.py"),
    ("a class docstring", '"""Decays."""', '"""Decays and decays."""', "main.py"),
    ("lines moved down", "import helpers", "\n\n\n\n\nimport helpers", "main.py"),
    ("an unused function edited", "return x + 1", "return x + 100", "main.py"),
    ("an unused function in another module edited", "x - 3", "x - 4", "helpers.py"),
    ("an unused function added", "def program():", "def another():\n    return 17\n\n\ndef program():", "main.py"),
    ("an unused function removed", "def unused(x):\n    return x + 1\n", "", "main.py"),
    ("an unused constant edited", "UNUSED = 1", "UNUSED = 2", "package/inner/constants.py"),
    ("an unused import added", "import functools", "import functools\nimport os, time, random", "main.py"),
    ("an unused method edited", "starts at", "begins at", "main.py"),
    ("an unused method added", "    def describe(self):", "    def reset(self):\n        self.log = open('x')\n\n    def describe(self):", "main.py"),
    ("annotations", "def clip(x, limit=1.0, *, low=-1.0):", "def clip(x: jax.Array, limit: float = 1.0, *, low: float = -1.0) -> jax.Array:", "main.py"),
    ("a local variable renamed", "    h = layers.dense(params[\"w\"], x)\n    h = activation(h) + constants.OFFSET\n    h = halve(clip(h)) * CONFIG.slope + TABLE\n    return helpers.reduce(h)", "    out = layers.dense(params[\"w\"], x)\n    out = activation(out) + constants.OFFSET\n    out = halve(clip(out)) * CONFIG.slope + TABLE\n    return helpers.reduce(out)", "main.py"),
    ("line breaks and parentheses", "return helpers.reduce(h) * OPTIONS[\"clip\"]", "return (\n        helpers.reduce(h)\n        * OPTIONS[\"clip\"]\n    )", "main.py"),
    ("other quotes", 'OPTIONS["clip"]', "OPTIONS['clip']", "main.py"),
    ("functions in another order", "def square(x):\n    return x * x\n\n\ndef scale_by(x, factor):\n    return x * factor\n", "def scale_by(x, factor):\n    return x * factor\n\n\ndef square(x):\n    return x * x\n", "helpers.py"),
    ("an unused class", "def program():", "class Nobody:\n    x = 1\n\n\ndef program():", "main.py"),
    ("a main guard", "def program():", "if __name__ == '__main__':\n    print('hello')\n\n\ndef program():", "main.py"),
    ("an equal number written otherwise", "RATE = 0.1", "RATE = 1e-1", "main.py"),
    ("an equal global computed otherwise", "np.arange(4.0)", "np.array([0.0, 1, 2, 3])", "main.py"),
    ("a type alias and a logger", "RATE = 0.1", "import logging\nlogger = logging.getLogger(__name__)\nArray = jax.Array\nRATE = 0.1", "main.py"),
    ("a string that only a logger would see", "Schedule(0.3)", "Schedule(start=0.3)", "main.py"),
    ("a module attribute nobody reads", "def program():", "helpers.color = 'red'\n\n\ndef program():", "main.py"),
    ("a type comment and a noqa", "def step(params, x):", "def step(params, x):  # noqa: D103  # type: ignore", "main.py"),
    ("static type checking imports", "import functools", "import functools\nimport typing\nif typing.TYPE_CHECKING:\n    import nothing", "main.py"),
]  # fmt: skip

_LINEN = Program(
    {
        "main.py": '''\
"""A linen model trained through a TrainState."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state


class Block(nn.Module):
    """One block."""

    width: int
    rate: float = 0.1
    use_bias: bool = True

    @nn.compact
    def __call__(self, x, train):
        h = nn.LayerNorm()(x)
        h = nn.gelu(nn.Dense(2 * self.width, use_bias=self.use_bias)(h))
        h = nn.Dropout(self.rate, deterministic=not train)(h)
        return x + nn.Dense(self.width)(h)

    def describe(self):
        return "a block"


class Model(nn.Module):
    layers: int = 2
    width: int = 8
    kernel_init: object = nn.initializers.lecun_normal()

    def setup(self):
        self.blocks = [Block(self.width) for _ in range(self.layers)]
        self.head = nn.Dense(3, kernel_init=self.kernel_init)

    def __call__(self, x, train=True):
        for block in self.blocks:
            x = block(x, train)
        return self.head(x)

    def features(self, x):
        return x * 2


class State(train_state.TrainState):
    key: jax.Array


def louder(function, args, kwargs, context):
    result = function(*args, **kwargs)
    return result * 2 if context.method_name == "__call__" else result


CONTEXT = nn.intercept_methods(louder)
entered = []


def undo():
    if entered:
        entered.pop().__exit__(None, None, None)


def optimizer(rate):
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 10, 100)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=1e-2))


def train_step(state, batch):
    key = jax.random.fold_in(state.key, state.step)

    def loss(params):
        logits = state.apply_fn({"params": params}, batch["x"], rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), {"loss": value}


def program():
    model = Model()
    x = jnp.ones((4, 8))

    def init():
        params = model.init(jax.random.key(0), x, train=False)["params"]
        return State.create(
            apply_fn=model.apply, params=params, tx=optimizer(1e-3), key=jax.random.key(1)
        )

    state = jax.eval_shape(init)
    batch = {"x": x, "y": jax.ShapeDtypeStruct((4,), "int32")}
    return {"fun": train_step, "args": (state, batch), "options": {"donate_argnums": 0}}
'''
    }
)

_LINEN_CHANGES = [
    ("a linen field given in a parent", "Block(self.width)", "Block(self.width, rate=0.3)"),
    ("a linen field's default", "rate: float = 0.1", "rate: float = 0.4"),
    ("a linen layer's option", "h = nn.LayerNorm()(x)", "h = nn.LayerNorm(epsilon=1e-3)(x)"),
    ("a linen layer's kind", "h = nn.LayerNorm()(x)", "h = nn.RMSNorm()(x)"),
    ("the activation", "nn.gelu(", "nn.relu("),
    ("a model field", "layers: int = 2", "layers: int = 3"),
    ("a residual dropped", "return x + nn.Dense(self.width)(h)", "return nn.Dense(self.width)(h)"),
    ("the optimizer's decay", "weight_decay=1e-2", "weight_decay=2e-2"),
    ("the optimizer's b2", "b2=0.99", "b2=0.95"),
    ("the schedule's peak", "optimizer(1e-3)", "optimizer(2e-3)"),
    ("the schedule's length", "10, 100)", "10, 200)"),
    ("the clipping", "clip_by_global_norm(1.0)", "clip_by_global_norm(2.0)"),
    ("the kind of optimizer", "optax.adamw(schedule, b2=0.99, weight_decay=1e-2)", "optax.lion(schedule)"),
    ("the loss", "softmax_cross_entropy_with_integer_labels(logits, batch[\"y\"])", "softmax_cross_entropy_with_integer_labels(2 * logits, batch[\"y\"])"),
    ("a new metric", '{"loss": value}', '{"loss": value, "norm": optax.global_norm(grads)}'),
    ("a lifted block", "Block(self.width)", "nn.remat(Block, static_argnums=(2,))(self.width)"),
    ("a method interceptor", "def program():\n", "def program():\n    CONTEXT.__enter__()\n    entered.append(CONTEXT)\n"),
    ("a linen method replaced from outside", "def program():\n", "class Louder(nn.Dense):\n    def __call__(self, x):\n        return super().__call__(x) * 2\n\n\ndef program():\n    Model.__call__ = lambda self, x, train=True: self.head(x)\n"),
]  # fmt: skip

_LINEN_HARMLESS = [
    ("a model's unused method", "return x * 2", "return x * 3"),
    ("a block's text", '"a block"', '"the block"'),
    ("a linen docstring", '"""One block."""', '"""One small block of the model."""'),
    ("an unused linen class", "class State(", "class Other(nn.Module):\n    x: int = 1\n\n\nclass State("),
    ("a linen field written out", "Block(self.width)", "Block(width=self.width)"),
    ("an optimizer helper with a comment", "def optimizer(rate):\n", "def optimizer(rate):\n    # the usual\n"),
    ("other weights", "jax.random.key(1)", "jax.random.key(2)"),
    ("a different seed for weights", "jax.random.key(0)", "jax.random.key(5)"),
]  # fmt: skip

_NNX = Program(
    {
        "main.py": '''\
"""An nnx model, trained functionally."""
import jax
import jax.numpy as jnp
import optax
from flax import nnx

SCALE = 1.0


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.power = 2

    def __call__(self, x):
        return x + self.dropout(nnx.relu(self.norm(self.linear(x)))) ** self.power * SCALE


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(4, rngs) for _ in range(2)])
        self.activation = nnx.gelu

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.activation(x)


def step(graph, state, x):
    model, optimizer = nnx.merge(graph, state)

    def loss(model):
        return (model(x) ** 2).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), value


def program():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))
    return {"fun": step, "args": (graph, state, jnp.ones((3, 4)))}
'''
    }
)

_NNX_CHANGES = [
    ("an nnx layer's option", "momentum=0.9", "momentum=0.8"),
    ("an nnx dropout rate", "nnx.Dropout(0.2", "nnx.Dropout(0.3"),
    ("an nnx static attribute", "self.power = 2", "self.power = 3"),
    ("an nnx function attribute", "self.activation = nnx.gelu", "self.activation = nnx.silu"),
    ("an nnx method", "return x + self.dropout", "return x - self.dropout"),
    ("a global read by an nnx method", "SCALE = 1.0", "SCALE = 2.0"),
    ("an nnx optimizer", "optax.adam(1e-3)", "optax.adam(3e-3)"),
    ("the nnx loss", "(model(x) ** 2)", "(model(x) ** 4)"),
    ("the number of nnx blocks", "range(2)", "range(3)"),
    ("an nnx model put in evaluation mode", "    graph, state", "    model.eval()\n    graph, state"),
]  # fmt: skip

_NNX_HARMLESS = [
    ("another seed for nnx weights", "nnx.Rngs(0)", "nnx.Rngs(3)"),
    ("an nnx docstring", "class Model(nnx.Module):\n", 'class Model(nnx.Module):\n    """Text."""\n\n'),
    ("an unused nnx method", "    def __call__(self, x):\n        for", "    def generate(self, x):\n        return 1\n\n    def __call__(self, x):\n        for"),
    ("an nnx comment", "    optimizer.update(", "    # update\n    optimizer.update("),
]  # fmt: skip


def _small(body: str, **extra: str) -> Program:
    header = "import functools\nimport jax\nimport jax.numpy as jnp\nimport numpy as np\n"
    return Program({"main.py": header + body, **extra})


_X = "    return {'fun': f, 'args': (jnp.ones(4),)}\n"

# Whole programs in two versions: what cannot be said as an edit of the programs above.
_SMALL_CHANGES = [
    ("the registration of a pytree", f"class P:\n    def __init__(self, a, b): self.a, self.b = a, b\njax.tree_util.register_pytree_node(P, lambda p: ((p.a, p.b), None), lambda _, c: P(*c))\ndef f(x): return jax.tree.leaves(P(x, 2 * x))[0]\ndef program():\n{_X}", "((p.a, p.b), None)", "((p.b, p.a), None)"),
    ("static data of an argument's pytree", "class P:\n    def __init__(self, a, k): self.a, self.k = a, k\njax.tree_util.register_pytree_node(P, lambda p: ((p.a,), p.k), lambda k, c: P(*c, k))\ndef f(p): return p.a * p.k\ndef program():\n    return {'fun': f, 'args': (P(jnp.ones(3), 2.0),)}\n", "2.0)", "3.0)"),
    ("a static argument", "def f(x, n): return x * n\ndef program():\n    return {'fun': f, 'args': (jnp.ones(3), 2), 'options': {'static_argnums': 1}}\n", ", 2)", ", 3)"),
    ("a static argument by name", "def f(x, *, n): return x * n\ndef program():\n    return {'fun': f, 'args': (jnp.ones(3),), 'kwargs': {'n': 2}, 'options': {'static_argnames': 'n'}}\n", "'n': 2", "'n': 3"),
    ("static by name, given by position", "def f(x, n): return x * n\ndef program():\n    return {'fun': f, 'args': (jnp.ones(3), 2), 'options': {'static_argnames': 'n'}}\n", ", 2)", ", 3)"),
    ("an inner jit's static function", "@functools.partial(jax.jit, static_argnums=1)\ndef g(x, h): return h(x)\ndef f(x): return g(x, jnp.sin)\ndef program():\n" + _X, "jnp.sin", "jnp.cos"),
    ("an inner jit's options", "@functools.partial(jax.jit, inline=False)\ndef g(x): return x + 1\ndef f(x): return g(x)\ndef program():\n" + _X, "inline=False", "inline=True"),
    ("a scan's body", "def body(c, _): return c * 2, None\ndef f(x): return jax.lax.scan(body, x, None, length=3)[0]\ndef program():\n" + _X, "c * 2", "c * 3"),
    ("a scan's length", "def f(x): return jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0]\ndef program():\n" + _X, "length=3", "length=4"),
    ("a custom derivative", "@jax.custom_jvp\ndef g(x): return x * 2\n@g.defjvp\ndef rule(p, t): return g(*p), t[0] * 3\ndef f(x): return jax.jvp(g, (x,), (x,))\ndef program():\n" + _X, "t[0] * 3", "t[0] * 4"),
    ("a descriptor's value", "class D:\n    def __init__(self, k): self.k = k\n    def __get__(self, o, t=None): return self.k\nclass C:\n    v = D(2.0)\nc = C()\ndef f(x): return x * c.v\ndef program():\n" + _X, "D(2.0)", "D(3.0)"),
    ("a property", "class C:\n    @property\n    def v(self): return 2.0\nc = C()\ndef f(x): return x * c.v\ndef program():\n" + _X, "return 2.0", "return 3.0"),
    ("a metaclass", "class M(type):\n    def __mul__(cls, x): return x * 2\nclass C(metaclass=M): pass\ndef f(x): return C * x\ndef program():\n" + _X, "x * 2", "x * 3"),
    ("a base class's method", "class B:\n    def g(self, x): return x * 2\nclass C(B): pass\nc = C()\ndef f(x): return c.g(x)\ndef program():\n" + _X, "x * 2", "x * 3"),
    ("the order of base classes", "class A:\n    k = 1.0\nclass B:\n    k = 2.0\nclass C(A, B): pass\ndef f(x): return x * C.k\ndef program():\n" + _X, "C(A, B)", "C(B, A)"),
    ("a method called by a computed name", "class C:\n    def one(self, x): return x * 2\nc = C()\nname = 'o' + 'ne'\ndef f(x): return getattr(c, name)(x)\ndef program():\n" + _X, "x * 2", "x * 3"),
    ("the name a method is called by", "class C:\n    def one(self, x): return x * 2\n    def two(self, x): return x * 3\nc = C()\nname = 'one'\ndef f(x): return getattr(c, name)(x)\ndef program():\n" + _X, "name = 'one'", "name = 'two'"),
    ("a slot's value", "class C:\n    __slots__ = ('v',)\nc = C()\nc.v = 2.0\ndef f(x): return x * c.v\ndef program():\n" + _X, "c.v = 2.0", "c.v = 3.0"),
    ("an enum's value", "import enum\nclass E(enum.Enum):\n    A = 2.0\n    B = 4.0\ndef f(x): return x * E.A.value\ndef program():\n" + _X, "A = 2.0", "A = 3.0"),
    ("a named tuple's field", "import collections\nT = collections.namedtuple('T', 'a b')\nt = T(2.0, 3.0)\ndef f(x): return x * t.a\ndef program():\n" + _X, "T(2.0, 3.0)", "T(5.0, 3.0)"),
    ("the order of named fields", "import collections\nT = collections.namedtuple('T', 'a b')\nt = T(2.0, 3.0)\ndef f(x): return x * t.a\ndef program():\n" + _X, "'a b'", "'b a'"),
    ("a bound method's object", "class C:\n    def __init__(self, k): self.k = k\n    def g(self, x): return x * self.k\nf = C(2.0).g\ndef program():\n" + _X, "C(2.0)", "C(3.0)"),
    ("a partial of a partial", "def g(a, b, x): return a * x + b\nf = functools.partial(functools.partial(g, 2.0), 3.0)\ndef program():\n" + _X, "3.0)", "4.0)"),
    ("a wrapped function's wrapper", "def deco(g):\n    @functools.wraps(g)\n    def w(x): return g(x) * 2\n    return w\n@deco\ndef f(x): return x + 1\ndef program():\n" + _X, "g(x) * 2", "g(x) * 3"),
    ("a jax array closed over", "k = jnp.arange(4.0)\ndef f(x): return x * k\ndef program():\n" + _X, "arange(4.0)", "arange(4.0) + 1"),
    ("a weak type closed over", "k = jnp.asarray(2)\ndef f(x): return (x.astype('bfloat16') * k)\ndef program():\n" + _X, "jnp.asarray(2)", "jnp.float32(2)"),
    ("a key closed over", "k = jax.random.key(0)\ndef f(x): return x + jax.random.normal(k, (4,))\ndef program():\n" + _X, "key(0)", "key(1)"),
    ("a dtype closed over", "dt = jnp.bfloat16\ndef f(x): return x.astype(dt)\ndef program():\n" + _X, "jnp.bfloat16", "jnp.float16"),
    ("negative zero", "k = 0.0\ndef f(x): return x * k\ndef program():\n" + _X, "k = 0.0", "k = -0.0"),
    ("an integer that becomes a float", "k = 2\ndef f(x): return x.astype('int32') * k\ndef program():\n" + _X, "k = 2", "k = 2.0"),
    ("a matched pattern", "def g(x, m):\n    match m:\n        case {'kind': 'a'}: return x * 2\n        case _: return x\nm = {'kind': 'a'}\ndef f(x): return g(x, m)\ndef program():\n" + _X, "m = {'kind': 'a'}", "m = {'kind': 'b'}"),
    ("a positional class pattern", "class C:\n    __match_args__ = ('a', 'b')\n    def __init__(self): self.a, self.b = 2.0, 3.0\nc = C()\ndef f(x):\n    match c:\n        case C(k): return x * k\ndef program():\n" + _X, "('a', 'b')", "('b', 'a')"),
    ("a function imported inside", "def f(x):\n    from other import g\n    return g(x)\ndef program():\n    import other\n" + _X, None, None),
    ("a module imported inside", "def f(x):\n    import other\n    return other.g(x)\ndef program():\n    import other\n" + _X, None, None),
    ("an abstract class's registration", "import abc\nclass A(abc.ABC): pass\nclass C: pass\nA.register(int)\ndef f(x): return x * (2 if isinstance(C(), A) else 3)\ndef program():\n" + _X, "A.register(int)", "A.register(C)"),
    ("a dispatched implementation", "@functools.singledispatch\ndef g(k, x): return x\n@g.register\ndef _(k: int, x): return x * 2\ndef f(x): return g(1, x)\ndef program():\n" + _X, "x * 2", "x * 3"),
    ("two lists that are one", "a = [1.0]\nb = [1.0]\ndef f(x):\n    a.append(2.0)\n    y = x * sum(b)\n    a.pop()\n    return y\ndef program():\n" + _X, "b = [1.0]", "b = a"),
    ("an operator's implementation", "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\ndef f(x): return (V(x) + V(2 * x)).x\ndef program():\n" + _X, "self.x + o.x", "self.x * o.x"),
    ("a context manager's effect", "import contextlib\nK = [1.0]\n@contextlib.contextmanager\ndef c():\n    K.append(2.0)\n    yield\n    K.pop()\ndef f(x):\n    with c():\n        return x * K[-1]\ndef program():\n" + _X, "K.append(2.0)", "K.append(3.0)"),
    ("a generator function", "def g(x):\n    yield x * 2\n    yield x\ndef f(x): return sum(g(x))\ndef program():\n" + _X, "x * 2", "x * 3"),
    ("a comprehension", "def f(x): return sum(x * i for i in range(3))\ndef program():\n" + _X, "range(3)", "range(4)"),
    ("the order of a dictionary", "d = {'a': 2.0, 'b': 3.0}\ndef f(x): return x * list(d.values())[0]\ndef program():\n" + _X, "{'a': 2.0, 'b': 3.0}", "{'b': 3.0, 'a': 2.0}"),
    ("a default factory", "import dataclasses\n@dataclasses.dataclass\nclass C:\n    v: list = dataclasses.field(default_factory=lambda: [2.0])\ndef f(x): return x * C().v[0]\ndef program():\n" + _X, "[2.0]", "[3.0]"),
    ("what happens after construction", "import dataclasses\n@dataclasses.dataclass\nclass C:\n    v: float = 1.0\n    def __post_init__(self): self.v = self.v * 2\ndef f(x): return x * C().v\ndef program():\n" + _X, "self.v * 2", "self.v * 3"),
    ("a library function patched", "def f(x): return jax.nn.silu(x)\nold = jax.nn.silu\ndef undo(): jax.nn.silu = old\ndef program():\n" + _X, "def program():\n", "def program():\n    jax.nn.silu = lambda x: x * 3\n"),
    ("a library function swapped for another", "def f(x): return jax.nn.silu(x)\nold = jax.nn.silu\ndef undo(): jax.nn.silu = old\ndef program():\n", "def program():\n", "def program():\n    jax.nn.silu = jax.nn.gelu\n"),
    ("a library's inner function patched", "import optax\nfrom optax._src import numerics\nold = numerics.safe_norm\ndef undo(): numerics.safe_norm = old\nopt = optax.lamb(1e-3)\ndef f(x): return opt.update(x, opt.init(x), x)[0]\ndef program():\n" + _X, "def program():\n", "def program():\n    numerics.safe_norm = lambda x, m, *a, **k: jnp.sum(x)\n"),
    ("a library's inner function swapped", "import optax\nold = jax.nn.log_softmax\ndef undo(): jax.nn.log_softmax = old\ndef f(x): return optax.losses.softmax_cross_entropy(x, x)\ndef program():\n" + _X, "def program():\n", "def program():\n    jax.nn.log_softmax = jax.nn.softmax\n"),
    ("a library class's method patched", "import flax.linen as nn\nold = nn.Dense.__call__\ndef undo(): nn.Dense.__call__ = old\nm = nn.Dense(4)\ndef f(x): return m.apply({'params': {'kernel': jnp.ones((4, 4)), 'bias': x}}, x)\ndef program():\n" + _X, "def program():\n", "def program():\n    nn.Dense.__call__ = lambda self, x: x * 3\n"),
    ("flax's axis rules", "import flax.linen as nn\ndef f(x): return nn.with_logical_constraint(x, ('a',), mesh=M)\nM = jax.sharding.Mesh(np.array(jax.devices()[:1]), ('d',))\nR = (('a', None),)\ndef program():\n    nn.set_logical_axis_rules(R)\n" + _X + "def undo(): nn.set_logical_axis_rules(())\n", "R = (('a', None),)", "R = (('a', 'd'),)"),
    ("a mesh closed over", "from jax.sharding import PartitionSpec as P\nS = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:1]), ('d',)), P('d'))\ndef f(x): return jax.lax.with_sharding_constraint(x, S)\ndef program():\n" + _X, "P('d')", "P(None)"),
    ("a sharding in the jit options", "from jax.sharding import PartitionSpec as P\nS = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:1]), ('d',)), P('d'))\ndef f(x): return x\ndef program():\n    return {'fun': f, 'args': (jnp.ones(4),), 'options': {'in_shardings': S}}\n", "P('d')", "P(None)"),
    ("a computed attribute", "class C:\n    def __init__(self): self.data = {'k': 2.0}\n    def __getattr__(self, n): return self.__dict__['data'][n]\nc = C()\ndef f(x): return x * c.k\ndef program():\n" + _X, "'k': 2.0", "'k': 3.0"),
    ("a Pallas-free kernel given by string", "ops = {'a': jnp.sin, 'b': jnp.cos}\ndef f(x): return ops[KIND](x)\nKIND = 'a'\ndef program():\n" + _X, "KIND = 'a'", "KIND = 'b'"),
    ("an ndarray subclass's value", "class A(np.ndarray): pass\na = np.ones(4).view(A)\ndef f(x): return x * np.asarray(a)\ndef program():\n" + _X, "np.ones(4)", "np.full(4, 2.0)"),
    ("a global set by another function", "K = 1.0\ndef set_k():\n    global K\n    K = 2.0\ndef f(x):\n    set_k()\n    return x * K\ndef program():\n" + _X, "K = 2.0", "K = 3.0"),
    ("an integer's subclass", "class I(int):\n    def __mul__(self, o): return o * 2\n    __rmul__ = __mul__\ni = I(5)\ndef f(x): return i * x\ndef program():\n" + _X, "o * 2", "o * 3"),
    ("a cached property's source", "class C:\n    @functools.cached_property\n    def v(self): return 2.0\ndef f(x): return x * C().v\ndef program():\n" + _X, "return 2.0", "return 3.0"),
    ("a class made by calling type", "C = type('C', (), {'v': 2.0})\ndef f(x): return x * C.v\ndef program():\n" + _X, "'v': 2.0", "'v': 3.0"),
    ("a dictionary subclass", "class D(dict):\n    def __missing__(self, k): return 2.0\nd = D()\ndef f(x): return x * d['a']\ndef program():\n" + _X, "return 2.0", "return 3.0"),
]  # fmt: skip

# The same function objects, traced, then something they use is changed, then seen for the first time.
_CHANGES_WHILE_RUNNING = {
    "a global": "K = 2.0\ndef f(x): return x * K\ndef change():\n    global K\n    K = 3.0\n",
    "a global of a jitted helper": "K = 2.0\n@jax.jit\ndef g(x): return x * K\ndef f(x): return g(x)\ndef change():\n    global K\n    K = 3.0\n",
    "a global of a scan's body": "K = 2.0\ndef body(c, _): return c * K, None\ndef f(x): return jax.lax.scan(body, x, None, length=2)[0]\ndef change():\n    global K\n    K = 3.0\n",
    "a global of a checkpointed function": "K = 2.0\ndef h(x): return x * K\ng = jax.checkpoint(h)\ndef f(x): return g(x)\ndef change():\n    global K\n    K = 3.0\n",
    "a global of a branch": "K = 2.0\ndef h(x): return x * K\ndef f(x): return jax.lax.cond(x.sum() > 0, h, jnp.sin, x)\ndef change():\n    global K\n    K = 3.0\n",
    "what a functools cache remembers": "K = 2.0\n@functools.cache\ndef k(): return K\ndef f(x): return x * k()\ndef change():\n    global K\n    K = 3.0\n",
    "a closed-over variable": "def make():\n    k = 2.0\n    def g(x): return x * k\n    def s():\n        nonlocal k\n        k = 3.0\n    return jax.jit(g), s\ng, change = make()\ndef f(x): return g(x)\n",
    "an object's attribute": "class C: k = 2.0\nc = C()\n@jax.jit\ndef g(x): return x * c.k\ndef f(x): return g(x)\ndef change(): c.k = 3.0\n",
    "an array in place": "k = np.ones(4)\n@jax.jit\ndef g(x): return x * k\ndef f(x): return g(x)\ndef change(): k[0] = 5.0\n",
    "a method": "class C:\n    def g(self, x): return x * 2\nc = C()\ng = jax.jit(c.g)\ndef f(x): return g(x)\ndef change(): C.g = lambda self, x: x * 3\n",
}  # fmt: skip


def pairs() -> Iterator[Pair]:
    """All pairs of this module; the change is real in all but the harmless ones."""
    for name, old, new, file in _STEP_CHANGES:
        first = _STEP
        if name == "a branch on a global":
            first = _STEP.edited("import jax.numpy as jnp", "import jax.numpy as jnp\nTHING = True", file).edited(old, new, file)  # fmt: skip
            yield Pair(name, first, first.edited("THING = True", "THING = False", file))
            continue
        yield Pair(name, first, first.edited(old, new, file))
    for name, old, new, file in _STEP_HARMLESS:
        yield Pair(name, _STEP, _STEP.edited(old, new, file), harmless=True)
    for base, changes, harmless in (
        (_LINEN, _LINEN_CHANGES, _LINEN_HARMLESS),
        (_NNX, _NNX_CHANGES, _NNX_HARMLESS),
    ):
        for name, old, new in changes:
            yield Pair(name, base, base.edited(old, new))
        for name, old, new in harmless:
            yield Pair(name, base, base.edited(old, new), harmless=True)
    for name, body, old, new in _SMALL_CHANGES:
        if old is None:
            first = _small(body, **{"other.py": "def g(x):\n    return x * 2\n"})
            yield Pair(name, first, first.edited("x * 2", "x * 3", "other.py"))
        else:
            body = body if body.endswith(_X) or "return {'fun'" in body or _X in body else body + _X
            first = _small(body)
            yield Pair(name, first, first.edited(old, new))


def running_pairs() -> Iterator[tuple[Pair, Pair]]:
    """Programs that change while they run, each against two others.

    Yields (the unchanged program against the one that was traced and then changed; the one that was
    changed in a fresh process against the one that was traced and then changed).
    """
    for name, body in _CHANGES_WHILE_RUNNING.items():
        files = _small(body + "def program():\n" + _X).files
        unchanged, changed, stale = (
            Program(files, mode) for mode in ("plain", "change", "trace, change")
        )
        yield (
            Pair(f"{name}, traced and changed", unchanged, stale),
            Pair(f"{name}, changed with and without a trace before", changed, stale),
        )
