"""Compiles kernels with Numba: converts declarations to Numba's types, and functions to machine code.

Imported only if a kernel is not in the cache. Numba only lowers each function to LLVM IR. All functions that a kernel
calls are linked first and then optimised once. Numba itself would optimise and compile each function alone and link the
results; by then addresses may have become offsets from null, which LLVM treats as undefined behaviour and removes.
Compiled code holds no reference to the interpreter: kernels have no Python objects and never raise. Only those passes
of Numba's run that such functions need, and the signature of an operator for given types is found once: this saves a
third of the time of lowering.
"""

import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import codegen, compiler, typed_passes, types, untyped_passes
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager
from numba.core.registry import cpu_target
from numba.core.types.misc import unliteral
from numba.core.typing import signature
from numba.core.typing.templates import make_concrete_template, make_intrinsic_template
from numba.core.typing.typeof import typeof_impl
from numba.extending import models, register_model

from cpu_kernels.declarations import Inner, Intrinsic, Kind, TupleOf, Vector, none
from cpu_kernels.isa import POLICIES, Isa, Target, emitted_isa, emitting
from cpu_kernels.simd.threads import SLEEPING

# External functions that kernels may call: memory, math functions without an instruction, sleeping, and what Windows'
# stack grows with.
SYMBOLS = ("memcpy", "memmove", "memset", "exp", "expf", "log", "fmaf", "rintf", *SLEEPING, "__chkstk")
_OPTIMISATION = 3
# Code that lets LLVM assume that a path is never taken, or that shows that it did.
_UNDEFINED = re.compile(
    r"getelementptr [^\n]*ptr null\b|(?:load|store) [^\n]*, ptr null\b|inttoptr \(i64 \d+ to ptr\)"
    r"|^ *unreachable|@llvm\.(?:ubsan)?trap",
    re.MULTILINE,
)
_ATTRIBUTES = re.compile(r"^attributes #\d+ = \{", re.MULTILINE)


class CompileError(Exception):
    """A function whose compiled code has undefined behaviour, or calls unknown functions."""


class _VectorType(types.Type):
    """Numba type of a vector, represented by the LLVM vector itself."""

    def __init__(self, kind: Vector) -> None:
        self.llvm = kind.llvm
        super().__init__(name=kind.name)


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, frontend: _VectorType) -> None:
        super().__init__(manager, frontend, frontend.llvm)


@functools.cache
def _numba(kind: Kind | TupleOf) -> Any:
    """Numba's type for a declared one."""
    if isinstance(kind, TupleOf):
        return types.containers.UniTuple(_numba(kind.kind), kind.count)
    return _VectorType(kind) if isinstance(kind, Vector) else getattr(types, kind.name)


def _is_tuple(type_: Any) -> bool:
    return isinstance(type_, types.containers.BaseTuple)


class _Remembered(types.Function):
    """A function built into Numba that remembers the signature for given types. Numba tries dozens for an operator."""

    def __init__(self, templates: Any) -> None:
        super().__init__(templates)
        self._found: dict[tuple[Any, ...], Any] = {}

    def get_call_type(self, context: Any, args: tuple[Any, ...], kws: Mapping[str, Any]) -> Any:
        """The signature of a call."""
        if kws:
            return super().get_call_type(context, args, kws)
        if args not in self._found:
            self._found[args] = super().get_call_type(context, args, kws)
        return self._found[args]


register_model(_Remembered)(models.OpaqueModel)


def _emitter(declared: Intrinsic) -> Callable[..., Any]:
    """The function that Numba calls to write an intrinsic's instructions."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        values: list[Any] = []
        for i, (kind, value) in enumerate(zip(sig.args, args, strict=True)):
            if i in declared.literals:
                values.append(kind.literal_value)
            elif _is_tuple(kind):
                values.append([builder.extract_value(value, member) for member in range(kind.count)])
            else:
                values.append(value)
        found = declared.emit(builder, *values)
        if isinstance(found, list):
            return context.make_tuple(builder, sig.return_type, found)
        return context.get_dummy_value() if found is None else found

    return codegen


@functools.cache
def _intrinsic_type(declared: Intrinsic) -> Any:
    """Numba's type of a declared intrinsic."""
    emit = _emitter(declared)

    def typer(_context: Any, *given: Any) -> Any:
        if not all(isinstance(given[i], types.Literal) for i in declared.literals):
            return None
        kinds = [kind if i in declared.literals else unliteral(kind) for i, kind in enumerate(given)]
        if declared.arguments is not None:
            kinds = [_numba(kind) for kind in declared.arguments]
        result = declared.result
        if isinstance(result, int):
            returned = kinds[result]
        elif isinstance(result, Kind) or result is None:
            returned = _numba(result or none)
        else:
            counts = (kind.count if _is_tuple(kind) else getattr(kind, "literal_value", 1) for kind in kinds)
            returned = _numba(result(*counts))
        return signature(returned, *kinds), emit

    # Numba takes the number of arguments from the typer's signature.
    kind, names = inspect.Parameter.POSITIONAL_OR_KEYWORD, ["context", *(f"value_{i}" for i in range(declared.arity))]
    vars(typer)["__signature__"] = inspect.Signature([inspect.Parameter(each, kind) for each in names])
    template = make_intrinsic_template(declared, typer, declared.name, prefer_literal=bool(declared.literals))
    return _Remembered(template)


@typeof_impl.register(Intrinsic)
def _type_of_intrinsic(declared: Intrinsic, _context: Any) -> Any:
    return _intrinsic_type(declared)


class _Library(codegen.CPUCodeLibrary):
    """A function as unoptimised LLVM IR, and the libraries of the functions it calls."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def add_linking_library(self, library: Any) -> None:
        # Skip Numba's runtime, which is linked to every function: it counts references, and kernels have none.
        if isinstance(library, _Library):
            self._linking_libraries.append(library)

    def finalize(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: the function has no address of its own, since it is part of a kernel."""
        return 0

    def all(self, seen: set[Any]) -> Iterator[Any]:
        """This library and all libraries that it calls, each once."""
        if self not in seen:
            seen.add(self)
            yield self
            for library in self._linking_libraries:
                yield from library.all(seen)


class _Codegen(codegen.JITCPUCodegen):
    _library_class = _Library

    def set_env(self, env_name: str, env: Any) -> None:
        """Do nothing: kernels have no environment of Python objects."""


@functools.cache
def _context() -> Any:
    """Numba's context for the CPU, with our own code library class."""
    context, typing = cpu_target.target_context, cpu_target.typing_context
    context.refresh()
    context._internal_codegen = _Codegen("kernels")
    for function in vars(operator).values():
        known = typing._lookup_global(function)
        if type(known) is types.Function:
            typing._remove_global(function)
            typing._insert_global(function, _Remembered(known.templates))
    return context


class _Passes(PassManager):
    _ENFORCING = False  # would analyse variables once more after each pass


class _Compiler(compiler.CompilerBase):
    """Numba's compiler without its passes for arrays, closures, exceptions and loops over mixed tuples."""

    def define_pipelines(self) -> list[Any]:
        """The one list of passes."""
        passes = _Passes("kernels")
        for each in (
            untyped_passes.TranslateByteCode,
            untyped_passes.FixupArgs,
            untyped_passes.IRProcessing,
            untyped_passes.RewriteSemanticConstants,
            untyped_passes.DeadBranchPrune,
            untyped_passes.GenericRewrites,
            untyped_passes.ReconstructSSA,
            untyped_passes.DeadBranchPrune,
            typed_passes.NopythonTypeInference,
            typed_passes.PreLowerStripPhis,
            typed_passes.IRLegalization,
            typed_passes.NativeLowering,
            typed_passes.NoPythonBackend,
        ):
            passes.add_pass(each, each.__name__)
        passes.finalize()
        return [passes]


class InnerType(types.Callable, types.Opaque):
    """Numba's type of a function that only compiled functions call: compiled for each tuple of arguments' types."""

    def __init__(self, function: Callable[..., Any], isa: Isa) -> None:
        self._function = function
        self._signatures: dict[tuple[Any, ...], Any] = {}
        super().__init__(f"{function.__module__}.{function.__qualname__} at {id(function)} for {isa}")

    def get_call_type(self, context: Any, args: tuple[Any, ...], kws: Mapping[str, Any]) -> Any:
        """The signature of a call; literals are treated as plain values of their type."""
        if kws:
            raise TypeError(f"{self.name}: compiled functions take arguments by position")
        kinds = tuple(unliteral(arg) for arg in args)
        if kinds not in self._signatures:
            result = _lowered(self._function, kinds, None)
            _context().insert_user_function((self, kinds), result.fndesc, [result.library])
            self._signatures[kinds] = result.signature
        template = make_concrete_template(self.name, self, [self._signatures[kinds]])
        return template(context).apply(args, kws)

    def get_call_signatures(self) -> tuple[list[Any], bool]:
        """The signatures that have been compiled."""
        return list(self._signatures.values()), False

    def get_impl_key(self, sig: Any) -> Any:
        """The key of a signature's implementation."""
        return self, sig.args


register_model(InnerType)(models.OpaqueModel)


@functools.cache
def _inner_type(function: Callable[..., Any], isa: Isa) -> InnerType:
    return InnerType(function, isa)


@typeof_impl.register(Inner)
def _type_of_inner(declared: Inner, _context: Any) -> Any:
    return _inner_type(declared.function, emitted_isa())


def _lowered(function: Callable[..., Any], args: tuple[Any, ...], result: Any) -> Any:
    """Numba's compilation of a function, up to LLVM IR."""
    flags = compiler.Flags()
    cpu_target.options.parse_as_flags(flags, {"error_model": "numpy", "fastmath": False, "nogil": True, "_nrt": False})
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
    flags.enable_pyobject = flags.force_pyobject = False
    context = _context()
    return compiler.compile_extra(
        cpu_target.typing_context, context, function, args, result, flags, {}, pipeline_class=_Compiler
    )


def _module(function: Callable[..., Any], symbol: str) -> Any:
    """A kernel and all functions that it calls as one module, whose only exported function is `symbol`."""
    context = _context()
    lowered = _lowered(function, (types.intp,) * 4, types.void)
    native = lowered.fndesc
    entry_module = context.create_module("entry")
    integers = [context.get_value_type(type_) for type_ in native.argtypes]
    entry = ir.Function(entry_module, ir.FunctionType(ir.VoidType(), integers), symbol)
    builder = ir.IRBuilder(entry.append_basic_block("entry"))
    kind = context.call_conv.get_function_type(native.restype, native.argtypes)
    callee = ir.Function(entry_module, kind, native.llvm_func_name)
    context.call_conv.call_function(builder, callee, native.restype, native.argtypes, entry.args)
    builder.ret_void()
    module = binding.parse_assembly(str(entry_module))
    for library in lowered.library.all(set()):
        module.link_in(library._final_module, preserve=True)
    for function_ in module.functions:
        if not function_.is_declaration:
            # Makes LLVM treat address 0 like any other address.
            function_.add_function_attribute("null_pointer_is_valid")
            if function_.name != symbol:
                function_.linkage = "internal"
    for variable in module.global_variables:
        if not variable.is_declaration:
            variable.linkage = "internal"
    module.verify()
    return module


@global_compiler_lock
def compile_kernel(function: Callable[[int, int, int, int], None], symbol: str, target: Target) -> bytes:
    """Compile a function with the kernel signature; return an object file whose `symbol` is its C function.

    Raises CompileError if the optimised code has undefined behaviour, or calls other functions than those allowed.
    """
    with emitting(target.isa):
        module = _module(function, symbol)
    policy = POLICIES[target.isa]
    features = ",".join(filter(None, (target.features, policy.tuning)))
    machine = binding.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=features, opt=_OPTIMISATION, reloc="pic", codemodel="small"
    )
    if policy.tuned_for:
        # llvmlite has no other way to say it. Every function has attributes, since _module adds one.
        module = binding.parse_assembly(_ATTRIBUTES.sub(rf'\g<0> "tune-cpu"="{policy.tuned_for}"', str(module)))
    module.triple, module.data_layout = target.triple, str(machine.target_data)
    options = binding.create_pipeline_tuning_options(_OPTIMISATION)
    options.loop_vectorization, options.slp_vectorization = True, False
    builder = binding.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    undefined = _UNDEFINED.search(str(module))
    if undefined:
        raise CompileError(f"kernel {symbol}: its optimised code is undefined: {undefined.group().strip()}")
    code = bytes(machine.emit_object(module))
    unknown = _called(code) - set(SYMBOLS)
    if unknown:
        raise CompileError(
            f"kernel {symbol}: it calls {', '.join(sorted(unknown))}, and may only call {', '.join(SYMBOLS)}"
        )
    return code


def _called(code: bytes) -> set[str]:
    """Undefined symbols of an ELF object file (see elf(5)). Empty for other formats, which the linker checks."""
    sections = {section.name(): section.data() for section in binding.ObjectFileRef.from_data(code).sections()}
    names = sections.get(b".strtab", b"")
    kind = [("name", "<u4"), ("kind", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
    symbols: Any = np.frombuffer(sections.get(b".symtab", b""), kind)
    starts = symbols["name"][symbols["section"] == 0]
    return {names[start : names.index(b"\0", start)].decode() for start in starts if start}
