"""A store over an engine that keeps rows and vectors but has no transactions, such as Milvus or Qdrant.

`Engine` is what such an engine must do; `RowPlace` and `RowStore` make of it all that an index asks of a place and a store.

**Moments.** Each write has a number, its moment. A row says at which it was born and at which it died; a reader takes the rows that were born by a
moment and have not died by then. Which moment is the latest stands in the head, one small text, which is replaced last: so a call is seen whole or
not at all. What a writer left that was stopped in its midst is of a moment that never came, and the next writer removes it.

**Turns.** One process writes at a time, by a lease; others wait. **Sweeping.** Rows that have been dead for long are deleted. A reader that takes
so long that this could concern it asks the head again, and begins anew if it did.
"""
