"""A Wireshark dissector in Lua, made of the tables of ``wire``: ``dblp pcap --lua dblp.lua``.

It finds datagrams by a heuristic (version, type and length fit), so no port need be named; bundles and super-packets are shown
record by record.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from dblp.transport import standing, wire
from dblp.transport.config import HEADER_BYTES
from dblp.transport.wire import Field, Type

_KINDS = {"B": "uint8", "H": "uint16", "I": "uint32", "Q": "uint64", "d": "double"}
_TABLES = {
    "open": wire.OPEN_FIELDS,
    "feedback": wire.FEEDBACK_FIELDS,
    "grant": wire.GRANT_FIELDS,
    "space": wire.SPACE_FIELDS,
    "final": wire.FINAL_FIELDS,
    "left": wire.LEFT_FIELDS,
    "state": standing.STATE_FIELDS,
}
"""Fields of payloads, little-endian; the header's are big-endian."""
_HEX = ("session", "message")
_OFFSETS = {name: offset for name, (_, offset, *_) in (wire.HEADER.fields or {}).items()}
_MESSAGE_AT, _RANK_AT = _OFFSETS["message"], _OFFSETS["rank"]

_HEAD = f"""\
-- Wireshark dissector of dblp's wire format, version {wire.VERSION}; made by: dblp pcap --lua dblp.lua
-- Use: wireshark -X lua_script:dblp.lua, or copy it into the folder of personal Lua plugins (Help, About, Folders).
local dblp = Proto("dblp", "dblp")
local f = {{}}
"""

_TAIL = f"""\
local function fits(buffer, at, whole)
  if buffer:len() - at < {HEADER_BYTES} then return false end
  local kind = buffer(at + 1, 1):uint()
  if buffer(at, 1):uint() ~= {wire.VERSION} or types[kind] == nil then return false end
  local flags, position = buffer(at + 2, 1):uint(), buffer(at + 5, 1):uint()
  if bit32_and(flags, {0xFF & ~wire.FLAGS_MASK}) ~= 0 or position >= {wire.BURST_DATAGRAMS} then return false end
  return at + {HEADER_BYTES} + buffer(at + {HEADER_BYTES - 2}, 2):uint() <= whole
end

local function record(buffer, at, whole, pinfo, tree)
  local kind, length = buffer(at + 1, 1):uint(), buffer(at + {HEADER_BYTES - 2}, 2):uint()
  local kept = math.min(length, buffer:len() - at - {HEADER_BYTES})
  local node = tree:add(dblp, buffer(at, {HEADER_BYTES} + kept), "dblp " .. types[kind])
  header(node, buffer, at)
  node:add(f.group, buffer(at + {_MESSAGE_AT}, 2))
  node:add(f.round, buffer(at + {_MESSAGE_AT + 2}, 4))
  node:add(f.step, buffer(at + {_MESSAGE_AT + 6}, 2))
  node:add(f.class, buffer(at + 2, 1))
  node:add(f.last, buffer(at + 2, 1))
  node:add(f.ask, buffer(at + 2, 1))
  if kept > 0 and kept == length then
    local show = bodies[kind]
    local body = buffer(at + {HEADER_BYTES}, length)
    if show ~= nil then
      if not pcall(show, node, buffer, at + {HEADER_BYTES}, at + {HEADER_BYTES} + length) then
        node:add_proto_expert_info(malformed)
      end
    else
      node:add(f.body, body)
    end
  elseif kept < length then
    node:add_proto_expert_info(cut)
  end
  return types[kind], at + {HEADER_BYTES} + length
end

local function dissect(buffer, pinfo, tree)
  local whole, at = buffer:reported_len(), 0
  if not fits(buffer, 0, whole) then return false end
  pinfo.cols.protocol = "dblp"
  local names = {{}}
  while at < whole do
    if not fits(buffer, at, whole) then
      tree:add_proto_expert_info(malformed)
      break
    end
    local name
    name, at = record(buffer, at, whole, pinfo, tree)
    names[#names + 1] = name
  end
  local rank, id = buffer({_RANK_AT}, 2):uint(), buffer({_MESSAGE_AT + 2}, 4):uint()
  pinfo.cols.info = table.concat(names, " + ", 1, math.min(#names, 4)) .. " rank=" .. rank .. " round=" .. id
  return true
end

function dblp.dissector(buffer, pinfo, tree)
  if not dissect(buffer, pinfo, tree) then return 0 end
  return buffer:len()
end
dblp:register_heuristic("udp", dissect)
"""

_SPECIAL = """\
f.group = ProtoField.uint16("dblp.group", "group")
f.round = ProtoField.uint32("dblp.round", "round")
f.step = ProtoField.uint16("dblp.step", "leg and step")
f.class = ProtoField.uint8("dblp.class", "class", base.DEC, nil, 0x{class_mask:02x})
f.last = ProtoField.bool("dblp.last", "LAST", 8, nil, 0x{last:02x})
f.ask = ProtoField.bool("dblp.ask", "ASK", 8, nil, 0x{ask:02x})
f.body = ProtoField.bytes("dblp.body", "payload")
f.signature = ProtoField.bytes("dblp.open.signature", "signature")
f.data = ProtoField.bytes("dblp.open.data", "data")
f.mask = ProtoField.uint64("dblp.space.mask", "mask", base.HEX)
f.bits = ProtoField.bytes("dblp.final.bits", "bits")
f.waits_for_rank = ProtoField.uint16("dblp.state.waits_for.rank", "waits for")
f.silent_rank = ProtoField.uint16("dblp.state.silent.rank", "silent")
dblp.fields = f
local malformed = ProtoExpert.new("dblp.malformed", "makes no sense", expert.group.MALFORMED, expert.severity.ERROR)
local cut = ProtoExpert.new("dblp.cut", "cut by the capture", expert.group.UNDECODED, expert.severity.NOTE)
dblp.experts = {{ malformed, cut }}

local function bit32_and(a, b)
  local result, place = 0, 1
  while a > 0 and b > 0 do
    if a % 2 == 1 and b % 2 == 1 then result = result + place end
    a, b, place = math.floor(a / 2), math.floor(b / 2), place * 2
  end
  return result
end
"""

_BODIES = f"""\
local bodies = {{}}
bodies[{int(Type.OPEN)}] = function(node, buffer, at, stop)
  local after = open(node, buffer, at)
  local length = buffer(after - 1, 1):uint()
  if length > 0 then node:add(f.signature, buffer(after, length)) end
  if after + length < stop then node:add(f.data, buffer(after + length, stop - after - length)) end
end
bodies[{int(Type.FEEDBACK)}] = function(node, buffer, at, stop)
  local after = feedback(node, buffer, at)
  local grants, spaces = buffer(after - 2, 1):uint(), buffer(after - 1, 1):uint()
  for _ = 1, grants do
    after = grant(node:add(buffer(after, {wire.GRANT_BYTES}), "grant"), buffer, after)
  end
  for _ = 1, spaces do
    local masks = buffer(after + 1, 1):uint()
    local part = node:add(buffer(after, {wire.SPACE_BYTES} + 8 * masks), "space")
    after = space(part, buffer, after)
    for _ = 1, masks do
      part:add_le(f.mask, buffer(after, 8))
      after = after + 8
    end
  end
end
bodies[{int(Type.FINAL)}] = function(node, buffer, at, stop)
  local after = final(node, buffer, at)
  if after < stop then node:add(f.bits, buffer(after, stop - after)) end
end
bodies[{int(Type.LEFT)}] = function(node, buffer, at, stop) left(node, buffer, at) end
bodies[{int(Type.STATE)}] = function(node, buffer, at, stop)
  local after = state(node, buffer, at)
  local waits_for, silent = buffer(after - 4, 2):le_uint(), buffer(after - 2, 2):le_uint()
  for index = 1, waits_for + silent do
    node:add_le(index <= waits_for and f.waits_for_rank or f.silent_rank, buffer(after, 2))
    after = after + 2
  end
end
"""


def script() -> str:
    """The text of the dissector."""
    types = ", ".join(f'[{int(type_)}] = "{type_.name}"' for type_ in Type)
    special = _SPECIAL.format(class_mask=wire.CLASS_MASK, last=wire.LAST, ask=wire.ASK)
    parts = [
        _HEAD,
        f"local types = {{ {types} }}",
        *_declarations("header", "dblp", wire.HEADER_FIELDS),
        *(line for name, table in _TABLES.items() for line in _declarations(name, f"dblp.{name}", table)),
        special,
        _reader("header", wire.HEADER_FIELDS, ">"),
        *(_reader(name, table, "<") for name, table in _TABLES.items()),
        _BODIES,
        _TAIL,
    ]
    return "\n".join(parts)


def _declarations(prefix: str, path: str, fields: Sequence[Field]) -> Iterable[str]:
    """The ProtoField of each field."""
    for field in fields:
        more = ""
        if prefix == "header" and field.name == "type":
            more = ", base.DEC, types"
        elif field.name in _HEX:
            more = ", base.HEX"
        meaning = field.meaning.replace("\\", "\\\\").replace('"', '\\"').replace("`", "")
        blank = "" if more or field.code == "d" else ", base.DEC"
        mask = "" if field.code == "d" else f"{', nil' if not more.endswith('types') else ''}, nil"
        yield (
            f'f.{prefix}_{field.name} = ProtoField.{_KINDS[field.code]}("{path}.{field.name}", "{field.name}"'
            f'{more}{blank}{mask}, "{meaning}")'
        )


def _reader(name: str, fields: Sequence[Field], order: str) -> str:
    """A function that adds the fields of a table, from ``at`` on, and returns where they end."""
    add = "add" if order == ">" else "add_le"
    lines = [f"local function {name}(node, buffer, at)"]
    offset = 0
    for field in fields:
        size = struct.calcsize(order + field.code)
        lines.append(f"  node:{add}(f.{name}_{field.name}, buffer(at + {offset}, {size}))")
        offset += size
    return "\n".join([*lines, f"  return at + {offset}", "end", ""])
