"""Doors for other programs: callbacks that let trainers train within a memory budget the models that they make.

    fxremat.integrations.transformers.RematCallback(mem="4GiB")    Trainer, Seq2SeqTrainer, the trainers of TRL
    fxremat.integrations.lightning.Remat(mem="4GiB")               lightning.Trainer

Each puts the planned step into the trainer's own model while training lasts: the trainer keeps its reference to the
model, and saves and evaluates it as ever. `training_steps` measures any program's steps, for the plugin of pytest.
"""
