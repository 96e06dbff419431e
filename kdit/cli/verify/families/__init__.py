"""Per family: how the reference library's pipelines are called, in kdit's words."""
