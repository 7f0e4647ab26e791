"""Reads a chat template without running it: does it only write contents, or look at them as well?

What a template that only writes them makes of a conversation follows from the roles of its turns:
it has to run once for each sequence of roles, not for each row. The answer errs on the safe side.
"""

from collections.abc import Iterable
from enum import Enum

from jinja2 import meta, nodes
from jinja2.exceptions import TemplateError

from stageline.data.text.template_trial import template_environment


class _Value(Enum):
    """What an expression may hold; CLEAN: nothing of a content."""

    CLEAN = 0
    CONTENT = 1
    MESSAGE = 2
    MESSAGES = 3


_CLEAN, _CONTENT, _MESSAGE, _MESSAGES = _Value
_TYPE_TESTS = {"boolean", "defined", "false", "iterable", "mapping", "none", "number", "sequence"}
_TYPE_TESTS |= {"string", "true", "undefined"}
_OF_MESSAGES = {"length": _CLEAN, "count": _CLEAN, "first": _MESSAGE, "last": _MESSAGE}
_OF_MESSAGES["list"] = _MESSAGES
_JOINING = (nodes.Add, nodes.Concat, nodes.And, nodes.Or)


class _Looks(Exception):
    """The template does more with a content than to write it, or may do so."""


def only_writes_contents(template: str) -> bool:
    """Whether contents of messages come into the text whole or trimmed, and decide nothing.

    Each message is taken to be a role and a text that is not blank, and nothing else. Dates, which
    change by themselves, count as a look.
    """
    try:
        _Reader().read_whole(template_environment().parse(template))
    except (_Looks, TemplateError):
        return False
    return True


def variables_of(template: str) -> frozenset[str]:
    """The names that a template may read and does not set, but those that jinja itself knows."""
    environment = template_environment()
    try:
        found = meta.find_undeclared_variables(environment.parse(template))
    except TemplateError:
        return frozenset()
    return frozenset(found) - environment.globals.keys()


class _Reader:
    """Goes through a template and remembers what its names may hold."""

    def __init__(self) -> None:
        self._names = {"messages": _MESSAGES}
        self._is_apart = False  # in a macro or a block that is kept: what it writes may be read

    def read_whole(self, tree: nodes.Template) -> None:
        """A template, until no name holds more: one may be used above the place where it is set."""
        before = None
        while before != self._names:
            before = dict(self._names)
            self.read([tree])

    def read(self, body: Iterable[nodes.Node]) -> None:
        """Statements."""
        for node in body:
            match node:
                case nodes.Template() | nodes.Scope():
                    self.read(node.body)
                case nodes.Output():
                    for child in node.nodes:
                        self._check(child, _CLEAN, _CONTENT)
                case nodes.For():
                    self._loop(node)
                case nodes.If():
                    self._value(node.test)
                    self.read([*node.body, *node.elif_, *node.else_])
                case nodes.Assign():
                    self._assign(node.target, self._value(node.node))
                case nodes.AssignBlock() | nodes.Macro():
                    before, self._is_apart = self._is_apart, True
                    self.read(node.body)
                    self._is_apart = before
                case nodes.ExprStmt():
                    self._check(node.node, _CLEAN)
                case nodes.Continue() | nodes.Break():
                    pass
                case _:
                    raise _Looks

    def _loop(self, node: nodes.For) -> None:
        value = self._check(node.iter, _CLEAN, _MESSAGES)
        self._assign(node.target, _MESSAGE if value is _MESSAGES else _CLEAN)
        if node.test is not None:
            self._value(node.test)
        self.read([*node.body, *node.else_])

    def _assign(self, target: nodes.Node, value: _Value) -> None:
        match target:
            case nodes.Name():
                name = target.name
            case nodes.NSRef():
                name = f"{target.name}.{target.attr}"
            case nodes.Tuple() if value is _CLEAN:
                return
            case _:
                raise _Looks
        self._names[name] = _joined([self._names.get(name, _CLEAN), value])

    def _check(self, node: nodes.Node | None, *allowed: _Value) -> _Value:
        value = self._value(node)
        if value not in allowed:
            raise _Looks
        return value

    def _value(self, node: nodes.Node | None) -> _Value:
        """What an expression may hold; each part of it is read."""
        match node:
            case nodes.Name():
                fields = (name for name in self._names if name.startswith(f"{node.name}."))
                if any(self._names[name] is not _CLEAN for name in fields):
                    raise _Looks  # handed on with them
                return self._seen(self._names.get(node.name, _CLEAN))
            case nodes.Getattr():
                return self._of_key(node.node, node.attr)
            case nodes.Getitem(arg=nodes.Const(value=str(key))):
                return self._of_key(node.node, key)
            case nodes.Getitem():
                self._check(node.arg, _CLEAN)
                value = self._check(node.node, _CLEAN, _MESSAGES)
                is_one = value is _MESSAGES and not isinstance(node.arg, nodes.Slice)
                return _MESSAGE if is_one else value
            case nodes.Call():
                return self._call(node)
            case nodes.Filter():
                return self._filter(node)
            case nodes.Test():
                value = self._value(node.node)
                if value is not _CLEAN and node.name not in _TYPE_TESTS:
                    raise _Looks
                return self._all_clean(node.args)
            case nodes.Compare():
                return self._compare(node)
            case nodes.CondExpr():
                self._value(node.test)
                return _joined(map(self._value, filter(None, (node.expr1, node.expr2))))
            case nodes.Not():
                self._value(node.node)
                return _CLEAN
            case _ if isinstance(node, _JOINING):
                return _joined(map(self._value, node.iter_child_nodes()))
        return self._all_clean(node.iter_child_nodes() if node is not None else ())

    def _seen(self, value: _Value) -> _Value:
        if self._is_apart and value is not _CLEAN:
            raise _Looks
        return value

    def _all_clean(self, parts: Iterable[nodes.Node]) -> _Value:
        for part in parts:
            self._check(part, _CLEAN)
        return _CLEAN

    def _of_key(self, owner: nodes.Node, key: str) -> _Value:
        if isinstance(owner, nodes.Name):
            if f"{owner.name}.{key}" in self._names:
                return self._seen(self._names[f"{owner.name}.{key}"])
            if owner.name == "loop" and key in ("previtem", "nextitem"):
                return self._seen(_MESSAGE)
        if self._check(owner, _CLEAN, _MESSAGE) is _CLEAN:
            return _CLEAN
        if hasattr(dict, key):  # all of the message at once
            raise _Looks
        return _CONTENT if key == "content" else _CLEAN

    def _call(self, node: nodes.Call) -> _Value:
        callee, given = node.node, [*node.args, *(keyword.value for keyword in node.kwargs)]
        if isinstance(callee, nodes.Getattr):
            if callee.attr == "strip" and not given:
                return self._check(callee.node, _CLEAN, _CONTENT)
            if callee.attr == "get" and isinstance(given[0], nodes.Const):
                default = _joined(map(self._value, given[1:]))
                return _joined([self._of_key(callee.node, str(given[0].value)), default])
        if isinstance(callee, nodes.Name) and callee.name == "strftime_now":
            raise _Looks
        others = filter(None, (node.dyn_args, node.dyn_kwargs))
        return self._all_clean([callee, *given, *others])

    def _filter(self, node: nodes.Filter) -> _Value:
        value = self._value(node.node)
        given = [*node.args, *(keyword.value for keyword in node.kwargs)]
        self._all_clean(given)
        if value is _CLEAN or (value is _CONTENT and node.name in ("trim", "string") and not given):
            return value
        if value is not _MESSAGES or node.name not in _OF_MESSAGES:
            raise _Looks
        return _OF_MESSAGES[node.name]

    def _compare(self, node: nodes.Compare) -> _Value:
        """Contents are compared with none alone; a message may be asked for a key."""
        values = [self._value(side) for side in (node.expr, *(each.expr for each in node.ops))]
        first, last = node.expr, node.ops[-1]
        is_key = isinstance(first, nodes.Const) and last.op in ("in", "notin")
        is_none = isinstance(last.expr, nodes.Const) and last.expr.value is None
        others = {value for value in values if value is not _CLEAN}
        may_compare = is_none or (is_key and others == {_MESSAGE})
        if others and (len(node.ops) > 1 or not may_compare):
            raise _Looks
        return _CLEAN


def _joined(values: Iterable[_Value]) -> _Value:
    """One of several: where one may be a content, all are."""
    others = {value for value in values if value is not _CLEAN}
    if len(others) > 1:
        raise _Looks
    return others.pop() if others else _CLEAN
