"""Reads TensorBoard's event files as they grow, without TensorFlow and the package tensorboard."""
