"""The run directory: paths, journals, manifests, ring. What ranks and supervisor share; see docs/format.md."""
