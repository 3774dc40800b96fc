"""The names of the built-in rewards and what each of them reads, for whoever has to know them without running them."""

BUILT_IN = ("remote_rm", "deepscaler", "math", "dapo", "f1", "gpqa", "exact", "random")
NOT_YET = ("ifbench",)  # names that exist and that this version cannot grade
BOXED = "boxed_"  # in front of a name: grade the content of the response's last box
NEED_LABEL = ("deepscaler", "math", "dapo", "f1", "exact")
SCORE_DICT = {"dapo": ("score", "acc", "pred")}  # rewards that are dicts, with their keys
