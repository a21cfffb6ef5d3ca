"""A whole schema, with all that it refers to, as a graph of schemas. Pure; used by `schema`."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from api.limits import MAX_SCHEMAS
from api.structured import keywords
from api.structured.keywords import Schema, shown
from engine.errors import InvalidRequestError

_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")


class SchemaGraph:
    """Looks through a schema.

    Args:
        root: the schema, not too large and not too deep.
        place: its name in the request.

    Raises:
        InvalidRequestError: a keyword has a value that it cannot have or that is too large, or a
            reference leads nowhere.
    """

    def __init__(self, root: Schema | bool, place: str) -> None:
        self.is_combined = False
        """Several schemas may describe one object together, so none knows all its properties."""

        self._root = root
        self._schemas: dict[int, Schema] = {}
        """By identity: one that is referred to twice is there once."""
        self._targets: dict[str, Schema | bool] = {}
        """By reference."""
        self._users: dict[int, list[int]] = defaultdict(list)
        """Of each schema, those that hold it or refer to it."""
        self._look_through(place)

    def _look_through(self, place: str) -> None:
        # No recursion: references may follow each other a thousand times.
        waiting: list[tuple[object, str, int | None]] = [(self._root, place, None)]
        while waiting:
            schema, where, user = waiting.pop()
            if isinstance(schema, bool):
                continue
            if not isinstance(schema, dict):
                raise InvalidRequestError(
                    f"{where} must be a schema: an object, true or false, not {shown(schema)}",
                    where,
                )
            if user is not None:
                self._users[id(schema)].append(user)
            if id(schema) not in self._schemas:
                self._schemas[id(schema)] = schema
                if len(self._schemas) > MAX_SCHEMAS:
                    raise InvalidRequestError(
                        f"{place} holds over {MAX_SCHEMAS} schemas in schemas", place
                    )
                keywords.check(schema, where)
                self._note_combination(schema)
                waiting += [
                    (child, where + step, id(schema)) for step, child in keywords.children(schema)
                ]
                if "$ref" in schema:
                    waiting.append((self._target(schema["$ref"], where), where, id(schema)))

    def _note_combination(self, schema: Schema) -> None:
        num_combining = sum(key in schema for key in _COMBINING)
        has_own = "properties" in schema or "patternProperties" in schema
        self.is_combined |= num_combining + has_own > 1 or len(schema.get("allOf", ())) > 1

    def _target(self, ref: str, place: str) -> Schema | bool:
        place = f"{place}.$ref"
        if not ref.startswith("#"):
            raise InvalidRequestError(
                f"{place}: only references into the schema itself (#/…) are followed, not"
                f" {shown(ref)}",
                place,
            )
        try:
            target: Schema | bool = keywords.resolve(self._root, ref)
        except (LookupError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"{place}: there is no {shown(ref)}", place) from error
        self._targets[ref] = target
        return target

    def can_end(self) -> bool:
        """Whether an instance of finite size is there, as far as references decide it: a list whose
        every item must hold another such list has none."""
        if isinstance(self._root, bool):
            return self._root
        ending: set[int] = set()
        waiting = dict.fromkeys(self._schemas)  # an ordered set: the innermost come last, and first
        while waiting:
            key, _ = waiting.popitem()
            if key not in ending and _Ending(self._targets, ending).of(self._schemas[key]):
                ending.add(key)
                waiting |= dict.fromkeys(self._users[key])
        return id(self._root) in ending


class _Ending:
    """Decides for one schema, given those of which it is known that they can end."""

    def __init__(self, targets: Mapping[str, Schema | bool], ending: set[int]) -> None:
        self._targets = targets
        self._ending = ending

    def of(self, schema: Schema) -> bool:
        if "$ref" in schema and not self._is_known(self._targets[schema["$ref"]]):
            return False
        if not all(map(self._is_known, schema.get("allOf", ()))):
            return False
        choices = [schema[key] for key in ("anyOf", "oneOf") if key in schema]
        if not all(any(map(self._is_known, choice)) for choice in choices):
            return False
        kinds = keywords.types(schema)
        return kinds is None or any(self._has_kind(schema, kind) for kind in kinds)

    def _is_known(self, schema: object) -> bool:
        return schema if isinstance(schema, bool) else id(schema) in self._ending

    def _has_kind(self, schema: Schema, kind: str) -> bool:
        needed: Sequence[object]
        match kind:
            case "object":
                properties = schema.get("properties", {})
                needed = [properties.get(name, True) for name in schema.get("required", ())]
            case "array":
                needed = _needed_items(schema)
            case _:
                needed = ()
        return all(map(self._is_known, needed))


def _needed_items(schema: Schema) -> Sequence[object]:
    """The schemas of the items that must be there."""
    items = schema.get("items", True)
    first = items if isinstance(items, list) else schema.get("prefixItems", [])
    rest = [] if isinstance(items, list) else [items]
    return [*first, *rest][: int(schema.get("minItems", 0))]
