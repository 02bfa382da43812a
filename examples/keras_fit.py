"""Keras' fit, watched: `KERAS_BACKEND=torch python examples/keras_fit.py`, or with any other backend.

The callback is all that is new. The model has more weights than data and learns the noise by heart: its `val_loss`
turns.
"""

import keras
import numpy as np
from evalstop_client.callbacks.keras import EvalStopCallback

keras.utils.set_random_seed(1)
chance = np.random.default_rng(1)
truth = chance.normal(size=(64, 1))
points, held_out = chance.normal(size=(40, 64)), chance.normal(size=(500, 64))
targets = points @ truth + 4 * chance.normal(size=(40, 1))

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.02), loss="mse")
path = "checkpoints/{epoch}.keras"  # a name of its own for every epoch: what is registered must stay
watch = EvalStopCallback(
    name="keras-fit",
    checkpoints=path,  # Keras tells nobody what it saves
    policy="paper",
    mode="enforce",
)
history = model.fit(
    points,
    targets,
    validation_data=(held_out, held_out @ truth),
    batch_size=40,
    epochs=3_000,
    callbacks=[keras.callbacks.ModelCheckpoint(path), watch],
    verbose=0,
)
print(f"ended at step {len(history.epoch)} of 3000")
