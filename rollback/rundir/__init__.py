"""The run directory: paths, journals, manifests, ring. The one thing that ranks and supervisor share; see docs/format.md."""
