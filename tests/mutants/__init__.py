"""Which slips of the hand would the tests notice? Draws some, makes each, and runs the tests that touch it.

slips       what could be wrong in one file, by kind, each an exact replacement in its text
draw        rooms, files and slips, from one seed
recorder    the plugin that notes which test runs which lines
effects     where a line that runs at import has its effect
touching    that note, kept until the tree changes, and the tests that may notice a slip
trial       copies of the tree, and pytest on one of them
failures    the plugin that notes which tests fail
run         slips in such copies, each tried by its tests
report      the table by room, the survivors, and their verdicts
"""
