"""Row attention: kept rows against the context keys and each row's own later keys."""
