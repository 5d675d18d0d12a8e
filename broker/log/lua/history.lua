-- History: check whether the log still holds an event that a caller remembers. A store may have lost its tail.
-- Keys:  conversation base  :events  stream  id '<n>-0', one field e: checksum and bytes of the event

--                          :once    hash    k:<action> -> checksum of a dispatched action
--                                           o:<action> -> '<first>:<last>' of the append that settled it, then
--                                           ':<checksum>' and ':<fingerprint>'
-- Tool workers may not read logs: they compare actions with what is noted beside their claims.

local store = require('store/prelude')
local history = {}

-- The checksum in the bytes of an event, eight hex digits; empty if they are no event.
function history.checksum_in(bytes)
  return #bytes >= 6 and string.format('%02x%02x%02x%02x', string.byte(bytes, 3, 6)) or ''
end

-- The reply for an append that an earlier call has made, from '<first>:<last>'.
function history.duplicate(range)
  local first, last = string.match(range, '(%d+):(%d+)')
  return {'duplicate', tonumber(first), tonumber(last)}
end

-- The checksum of an event, eight hex digits; nil if the log has no such event.
function history.checksum_of(base, id)
  local bytes = history.bytes_of(base, id)
  return bytes and history.checksum_in(bytes)
end

-- The bytes of an event; nil if the log has no such event; nil, true if the caller may not read it.
function history.bytes_of(base, id)
  local events, name = base .. ':events', id .. '-0'
  if not store.may('XRANGE', events, name, name) then return nil, true end
  local found = redis.call('XRANGE', events, name, name)
  return #found == 1 and found[1][2][2] or nil
end

-- Whether the log still holds an event with this id and checksum ('' or nil to skip the check). A store that lost its tail
-- assigns the ids of lost events again.
function history.remembers(base, id, checksum)
  return not checksum or checksum == '' or history.checksum_of(base, id) == checksum
end

-- Whether the log still holds an action with this id and checksum, by what is noted of it. Of an action that an earlier
-- version has dispatched, only its entry is: the log is read, if the caller may.
function history.remembers_action(base, action, checksum)
  if not checksum or checksum == '' then return true end
  local noted, settled = unpack(redis.call('HMGET', base .. ':once', 'k:' .. action, 'o:' .. action))
  noted = noted or settled and string.match(settled, '^%d+:%d+:(%x+)')
  if noted then return noted == checksum end
  local bytes, is_refused = history.bytes_of(base, action)
  if is_refused then return redis.call('HEXISTS', base .. ':once', 'q:' .. action) == 1 end
  return bytes ~= nil and history.checksum_in(bytes) == checksum
end

return history
