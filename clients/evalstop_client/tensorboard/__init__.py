"""TensorBoard's event files: read as they grow, without TensorFlow and without the package tensorboard."""
