"""Callbacks that let trainers train within a memory budget the models that they make themselves.

    fxremat.integrations.transformers.RematCallback(mem="4GiB")    Trainer, Seq2SeqTrainer, the trainers of TRL
    fxremat.integrations.lightning.Remat(mem="4GiB")               lightning.Trainer

Each puts the planned step into the trainer's own model while training lasts: the trainer keeps its reference to the
model, and saves and evaluates it as ever.
"""
