"""What is wrong with a layout, in the pieces a report about flags needs. Knows nothing of reports themselves."""


class LayoutError(ValueError):
    """A layout that cannot be: the flags (or config.json keys) concerned, what is wrong, and what would be legal.

    flags: names with their dashes. says: the rule with its arithmetic. try_: a legal value, "" when there is none
    to name.
    """

    def __init__(self, flags: tuple[str, ...], says: str, try_: str = ""):
        super().__init__(f"{', '.join(flags)}: {says}" + (f"; try: {try_}" if try_ else ""))
        self.flags, self.says, self.try_ = flags, says, try_
