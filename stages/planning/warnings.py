"""What of a training that can run its user may not have meant."""

from stages.base.packed import METRICS, PackMetrics
from stages.model import adapters
from stages.model.manifest import ModelManifest
from stages.planning.estimate import Plan
from stages.training.params import TrainParams
from stages.training.schedule import learning_rate, lr_ratio

_LEAST_HELD_OUT = 0.02
"""Part of the rows below which a warning says so."""


def warn(params: TrainParams, plan: Plan, model: ModelManifest) -> None:
    """Print all warnings and notes."""
    _warn_of_schedule(params, plan)
    _warn_of_held_out(plan)
    if warning := model.router_warning(params.lora_r):
        print(warning)
    if params.lora_r:
        _warn_of_modules(params, model)
        warn_of_peft(params, model)
        _warn_of_new_tokens(params, model)


def _warn_of_schedule(params: TrainParams, plan: Plan) -> None:
    """Warn where the learning rate does not end where `min_lr_ratio` asks for."""
    if params.warmup_steps >= plan.steps:
        highest = learning_rate(params, plan.steps, plan.steps - 1)
        print(
            f"warning: warmup_steps {params.warmup_steps} lasts until the end of the training: the learning rate rises "
            f"to {highest:.2e} in the last of {plan.steps} steps, and never decays: lower warmup_steps"
        )
    elif params.lr_schedule != "constant" and lr_ratio(params, plan.steps, plan.steps) > params.min_lr_ratio + 1e-9:
        end, last = params.lr_decay_steps or plan.steps, learning_rate(params, plan.steps, plan.steps - 1)
        if end > plan.steps:
            why = f"lr_decay_steps {end} is more than the {plan.steps} steps of the training"
            remedy = "lower lr_decay_steps, unless a longer run is to follow"
        else:
            why = f"lr_decay_ratio {params.lr_decay_ratio} of {end} steps is rounded to 0 steps of decay"
            remedy = f"raise lr_decay_ratio to {1 / end:.2g} or more"
        print(
            f"warning: {why}: the learning rate of the last step is {last:.2e}, and min_lr_ratio asks for "
            f"{params.lr * params.min_lr_ratio:.2e}: {remedy}"
        )


def _warn_of_held_out(plan: Plan) -> None:
    """Warn where splits have few of the rows; a `validation_fraction` is what somebody wants."""
    if plan.validation_rows:
        share = plan.validation_rows / (plan.training_rows + plan.validation_rows)
        if share < _LEAST_HELD_OUT and PackMetrics.read(METRICS).origin.params["validation_fraction"] is None:
            print(
                f"warning: only {share:.1%} of the rows are held out: splits have equal numbers of files, not of "
                "tokens: set validation_fraction, such as 0.05"
            )


def _warn_of_modules(params: TrainParams, model: ModelManifest) -> None:
    """Name the linear modules that get no adapter, and why."""
    if params.lora_target_modules == adapters.ALL_LINEAR:
        for name, linear in model.linears.items():
            if linear.problem:
                print(f"note: {name} gets no adapter: {linear.problem}")


def warn_of_peft(params: TrainParams, model: ModelManifest) -> None:
    """Warn where the adapters cannot be used without merging them, or have more parameters than what they change."""
    from stages.model import meta

    kinds = adapters.choose(model.linears, params.lora_target_modules, model.architecture)
    built = meta.build(model.directory())
    if problem := adapters.peft_problem(kinds, meta.has_joined_experts(built)):
        print(f"warning: {problem}")
    linears = meta.find_linears(built, model.layer_classes)
    adapted = (name for name in linears if adapters.kind(name) in kinds)
    name = min(adapted, key=lambda name: min(linears[name].weight.shape))
    rows, columns = linears[name].weight.shape
    if params.lora_r is not None and params.lora_r > min(rows, columns):
        print(
            f"warning: lora_r is {params.lora_r}, but {adapters.kind(name)} has a matrix of {rows} x {columns}: a rank "
            f"above {min(rows, columns)} only adds parameters. Lower lora_r, or leave it out of lora_target_modules"
        )


def _warn_of_new_tokens(params: TrainParams, model: ModelManifest) -> None:
    """Warn where turns end with tokens that the model may not know, as adapters leave the embedding as it is."""
    packed = PackMetrics.read(METRICS)
    conversations = packed.train.conversations
    if conversations is None or packed.chat_templates == model.chat_templates:
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model.verify_tokenizer()))
    names = ", ".join(str(tokenizer.id_to_token(token)) for token in conversations.terminators)
    print(
        f"warning: the chat template is not that of {model.model_name}, and adapters do not train the embedding: if "
        f"the model does not know {names or 'the tokens of the template'}, use its own template, or lora_r null"
    )
