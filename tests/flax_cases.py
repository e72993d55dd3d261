"""Training loops of Flax users, each in three functions: what it starts from, its step, and a batch."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from watching import watching

import orbax_aot as oaot

CASES: dict[str, type[Case]] = {}


class Case:
    """A loop. `step` takes the state and a batch, and returns the state and a loss."""

    donates = True

    def init(self) -> Any:
        raise NotImplementedError

    @staticmethod
    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        raise NotImplementedError

    def target(self) -> Any:
        """An abstract state, as its users make it."""
        return jax.tree.map(ocp.utils.to_shape_dtype_struct, self.init())

    def jitted(self) -> Any:
        return oaot.jit(self.step, donate_argnums=0 if self.donates else None)


def case(cls: type[Case]) -> type[Case]:
    CASES[cls.__name__] = cls
    return cls


def make_batch(number):
    return jnp.asarray(np.random.default_rng(number).normal(size=(8, 4)), jnp.float32)


def digest(tree):
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found.update(np.asarray(jnp.asarray(leaf)).tobytes())
    return found.hexdigest()


# -- linen ------------------------------------------------------------------------------------------------------------


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.5, deterministic=not train)(nn.relu(x))
        return nn.Dense(2)(x)


class LinenState(train_state.TrainState):
    batch_stats: Any
    key: jax.Array


@case
class TrainStateWithBatchStatsAndDropoutKey(Case):
    def init(self):
        model = LinenNet()
        variables = model.init(jax.random.key(0), make_batch(0), train=False)
        return LinenState.create(
            apply_fn=model.apply,
            params=variables["params"],
            tx=optax.adam(1e-2),
            batch_stats=variables["batch_stats"],
            key=jax.random.key(1),
        )

    @staticmethod
    def step(state, batch):
        def loss_fn(params):
            y, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch,
                mutable=["batch_stats"],
                rngs={"dropout": jax.random.fold_in(state.key, state.step)},
            )
            return jnp.mean(y**2), updates

        (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
        return state, loss


class PartitionedNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        x = nn.relu(nn.Dense(8, kernel_init=init)(x))
        return nn.Dense(2, kernel_init=init)(x)


@case
class LinenWithPartitioning(Case):
    """The parameters stay in their `nn.Partitioned` boxes, and lie as these say."""

    def mesh(self):
        return jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])

    def init(self):
        model = PartitionedNet()

        def create():
            params = model.init(jax.random.key(0), make_batch(0))["params"]
            return train_state.TrainState.create(
                apply_fn=model.apply, params=params, tx=optax.adam(1e-2)
            )

        specs = nn.get_partition_spec(jax.eval_shape(create))
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh(), spec), specs)
        return jax.jit(create, out_shardings=shardings)()

    @staticmethod
    def step(state, batch):
        loss, grads = jax.value_and_grad(
            lambda params: jnp.mean(state.apply_fn({"params": params}, batch) ** 2)
        )(state.params)
        return state.apply_gradients(grads=grads), loss


# -- nnx --------------------------------------------------------------------------------------------------------------


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.grow = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.shrink = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.shrink(self.dropout(nnx.relu(self.norm(self.grow(x)))))


def nnx_update(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def nnx_objects(net=NnxNet):
    model = net(nnx.Rngs(0, dropout=1))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)}


@case
class NnxSplitAndMerge(Case):
    """Model with batch statistics and dropout keys, and `nnx.Optimizer`, as one `nnx.State`."""

    net = NnxNet

    def init(self):
        return nnx.state(nnx_objects(self.net))

    def target(self):
        return nnx.state(nnx.eval_shape(functools.partial(nnx_objects, self.net)))

    def jitted(self):
        graph = nnx.graphdef(nnx.eval_shape(functools.partial(nnx_objects, self.net)))
        return oaot.jit(functools.partial(nnx_step, graph), donate_argnums=0)


def nnx_step(graph, state, batch):
    objects = nnx.merge(graph, state)
    loss = nnx_update(objects["model"], objects["optimizer"], batch)
    return nnx.state(objects), loss


@case
class NnxStateFilters(Case):
    """Only what filters choose is state of the step; the keys of dropout come anew from the count of steps."""

    def init(self):
        objects = nnx_objects()
        params, stats, rest = nnx.state(objects["model"], nnx.Param, nnx.BatchStat, ...)
        return {
            "params": params,
            "stats": stats,
            "rngs": rest,
            "optimizer": nnx.state(objects["optimizer"], nnx.optimizer.OptState),
        }

    def jitted(self):
        objects = nnx.eval_shape(nnx_objects)
        return oaot.jit(
            functools.partial(
                nnx_filtered_step,
                nnx.graphdef(objects["model"]),
                nnx.graphdef(objects["optimizer"]),
            )
        )


def nnx_filtered_step(graph, optimizer_graph, state, batch):
    model = nnx.merge(graph, state["params"], state["stats"], state["rngs"])
    optimizer = nnx.merge(optimizer_graph, state["optimizer"])
    loss = nnx_update(model, optimizer, batch)
    params, stats, rngs = nnx.state(model, nnx.Param, nnx.BatchStat, ...)
    return {
        "params": params,
        "stats": stats,
        "rngs": rngs,
        "optimizer": nnx.state(optimizer),
    }, loss


class PartitionedNnxNet(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        self.grow = nnx.Linear(4, 8, kernel_init=init, rngs=rngs)
        self.shrink = nnx.Linear(8, 2, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return self.shrink(nnx.relu(self.grow(x)))


@case
class NnxWithPartitioning(NnxSplitAndMerge):
    """Parameters carry sharding metadata, by which the state is placed."""

    net = PartitionedNnxNet

    def mesh(self):
        return jax.make_mesh(
            (2, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4]
        )

    def shardings(self, state):
        specs = nnx.get_partition_spec(state)
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh(), spec),
            specs,
            is_leaf=lambda x: isinstance(x, P),
        )

    def init(self):
        with jax.set_mesh(self.mesh()):
            state = nnx.state(nnx_objects(self.net))
        return jax.device_put(state, self.shardings(state))

    def target(self):
        with jax.set_mesh(self.mesh()):
            state = nnx.state(nnx.eval_shape(functools.partial(nnx_objects, self.net)))
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            state,
            self.shardings(state),
        )

    def jitted(self):
        with jax.set_mesh(self.mesh()):
            return super().jitted()


@case
class NnxModulesAsTrees(Case):
    """Module and optimizer are arguments and results themselves; their leaves are saved."""

    donates = False

    def init(self):
        return nnx_objects()

    @staticmethod
    def step(state, batch):
        loss = nnx_update(state["model"], state["optimizer"], batch)
        return state, loss


# -- bridges ----------------------------------------------------------------------------------------------------------


class BridgedNet(nnx.Module):
    def __init__(self, rngs):
        self.linen = nnx.bridge.ToNNX(nn.Dense(8), rngs=rngs)
        self.linen.lazy_init(jnp.ones((8, 4)))
        self.shrink = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.shrink(nnx.relu(self.linen(x)))


@case
class LinenInNnx(NnxSplitAndMerge):
    net = BridgedNet


class NnxInLinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nnx.bridge.to_linen(nnx.Linear, 4, 8)(x))
        return nn.Dense(2)(x)


@case
class NnxInLinen(Case):
    def init(self):
        model = NnxInLinenNet()
        params = model.init(jax.random.key(0), make_batch(0))["params"]
        return train_state.TrainState.create(
            apply_fn=model.apply, params=params, tx=optax.adam(1e-2)
        )

    @staticmethod
    def step(state, batch):
        loss, grads = jax.value_and_grad(
            lambda params: jnp.mean(state.apply_fn({"params": params}, batch) ** 2)
        )(state.params)
        return state.apply_gradients(grads=grads), loss


# -- what the processes do --------------------------------------------------------------------------------------------


def run_steps(function: Callable[..., Any], state: Any, numbers: range) -> tuple[Any, list[str]]:
    losses = []
    for number in numbers:
        state, loss = function(state, make_batch(number))
        losses.append(float(loss).hex())
    return state, losses


def train_and_save(path, name):
    """Takes two steps, saves, and goes on for two more."""
    one = CASES[name]()
    step = one.jitted()
    state, _ = run_steps(step, one.init(), range(2))
    with ocp.CheckpointManager(f"{path}/{name}", item_handlers=oaot.AotHandler()) as manager:
        manager.save(2, args=oaot.AotSave(saved_form(state), fns={"step": step}))
        manager.wait_until_finished()
    saved = digest(state)
    state, losses = run_steps(step, state, range(2, 4))
    return {"saved": saved, "losses": losses, "last": digest(state)}


def saved_form(state):
    """Orbax stores pure trees; a module's state stands for it."""
    if any(isinstance(x, nnx.Module) for x in jax.tree.leaves(state, is_leaf=is_module)):
        return nnx.state(state)
    return state


def is_module(x):
    return isinstance(x, nnx.Module)


def resume(path, name):
    """Restores with the live function and goes on for two steps."""
    one = CASES[name]()
    step, target = one.jitted(), one.target()
    modules = target if isinstance(one, NnxModulesAsTrees) else None
    if modules is not None:
        modules = one.init()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.state(modules))
    with watching() as watched:
        with ocp.CheckpointManager(f"{path}/{name}", item_handlers=oaot.AotHandler()) as manager:
            args = oaot.AotRestore(target, fns={"step": step})
            state, fns = manager.restore(2, args=args)
        if modules is not None:
            nnx.update(modules, state)
            state = modules
        saved = digest(state)
        kind = jax.tree.structure(state)
        state, losses = run_steps(fns.step, state, range(2, 4))
    report = fns.report["step"]
    return {
        "saved": saved,
        "losses": losses,
        "last": digest(state),
        "same type": jax.tree.structure(state) == kind,
        "verdict": report.verdict.name,
        "reasons": [str(r) for r in report.reasons],
        "checked_by": report.checked_by,
        "traced": watched.work("step"),
        "tracebacks": watched.tracebacks(),
    }
