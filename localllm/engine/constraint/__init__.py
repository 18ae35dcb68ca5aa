"""Constraints: which tokens may come next so that the whole answer is JSON or matches a schema, regex or grammar."""

from localllm.engine.constraint.compile import ConstraintKind, compile_constraint
from localllm.engine.constraint.constraint import Constraint
from localllm.engine.constraint.lazy import HeldPart, LazyConstraint
from localllm.engine.constraint.vocabulary import ConstraintVocabulary

__all__ = ["Constraint", "ConstraintKind", "ConstraintVocabulary", "HeldPart", "LazyConstraint", "compile_constraint"]
