"""Carries out stops for any scheduler: verifies, journals, executes, confirms and reports them."""
