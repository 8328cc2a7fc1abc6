"""Plans a job before it starts, without Ray: numbers of ranks and workers, bundles, memory; and examines this
machine."""
