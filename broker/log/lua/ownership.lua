-- Ownership: the worker that decides for a conversation. Its fencing token grows with each claim.
-- Keys:  conversation base  :meta  owner, token, orphan_of   :grants  mark, crashes, late, see marks.lua
--                           :snapshot  string
--        shard base         :worker:<id>:owned  set   :takeovers  stream

local groups = require('log/lua/groups')
local history = require('log/lua/history')
local marks = require('log/lua/marks')
local results = require('log/lua/results')
local store = require('store/prelude')
local tenants = require('log/lua/tenants')
local turns = require('log/lua/turns')
local wakeups = require('log/lua/wakeups')
local ownership = {}

function ownership.is_owner(meta, worker, token)
  return store.get(meta, 'owner') == worker and store.get(meta, 'token') == token
end

-- The set of a worker's conversations. A key of another type is moved away, and the set is rebuilt from the conversations.
function ownership.owned_by(shard, worker)
  local key = shard .. ':worker:' .. worker .. ':owned'
  local kind = redis.call('TYPE', key)['ok']
  if kind == 'set' or kind == 'none' then return key end
  store.is_there(shard, key, 'set')
  for _, cid in ipairs(redis.call('ZRANGE', shard .. ':index', 0, -1)) do
    if redis.pcall('HGET', shard .. ':c:' .. cid .. ':meta', 'owner') == worker then redis.call('SADD', key, cid) end
  end
  return key
end

-- claim: become the owner of a conversation that has none.
-- ARGV  cid, worker, ready entry to acknowledge or '', and optionally the name of the stream that the entry is from:
--       'ready' or 'ready:interactive'
-- returns  {'claimed', token, last, crashes, node or '', closed '1' or ''} {'yours'} {'owned'} {'missing'} {'swept'}
--          with the optional argument, 'claimed' ends with class, share and the share's weight
local function claim(keys, args)
  local base, shard = keys[1], keys[2]
  local meta, cid, worker, entry = base .. ':meta', args[1], args[2], args[3]
  if not store.alive(shard, worker) then return {'swept'} end
  if entry ~= '' then
    local stream = shard .. ':' .. (args[4] == 'ready:interactive' and args[4] or 'ready')
    redis.call('XACK', stream, groups.CONTROLLERS, entry)
    turns.pump(shard, stream, groups.CONTROLLERS, wakeups.hand_over_ready)
  end
  local last = tonumber(store.get(meta, 'last_id'))
  if not last then
    redis.call('ZREM', shard .. ':unread', cid)
    return {'missing'}
  end
  local owner, now = store.get(meta, 'owner'), store.now_ms(shard)
  if owner == worker then return {'yours'} end
  if owner and store.alive(shard, owner) then
    wakeups.notify_again(shard, meta, cid, now)
    return {'owned'}
  end
  local owned = ownership.owned_by(shard, worker)  -- before any write: an incomplete claim would have no owner
  local before = tonumber(store.get(meta, 'token')) or 0
  local token = before + 1
  if now > token then token = now end
  token = string.format('%.0f', token)
  redis.call('HSET', meta, 'owner', worker, 'token', token)
  redis.call('HDEL', meta, 'rung', 'ready_id')
  redis.call('ZREM', shard .. ':unread', cid)
  redis.call('ZREM', shard .. ':parked', cid)
  redis.call('SADD', owned, cid)
  results.tell_owner(shard, base, cid, worker)
  local from = store.get(meta, 'orphan_of')
  if from then
    redis.call('HDEL', meta, 'orphan_of')
    redis.call('XADD', shard .. ':takeovers', 'MAXLEN', '~', 10000, '*', 'c', cid, 'from', from, 'to', worker, 'at', now)
  end
  local claimed = {'claimed', token, last, marks.take_over(base), store.get(meta, 'node') or '',
    store.get(meta, 'closed') or ''}
  if args[4] then
    local class, tenant = unpack(redis.call('HMGET', meta, 'class', 'tenant'))
    local share, weight = tenants.share_of(shard, tenant or '')
    for _, part in ipairs({class or '1', share, string.format('%.6f', weight)}) do claimed[#claimed + 1] = part end
  end
  return claimed
end

-- release: release a conversation, unless it has new events.
-- ARGV  cid, worker, token, id of the last event seen, for how many ms to park it or '', checksum of that event
-- returns  {'released'} {'news', last} {'fenced'} {'lost', last}   news with this last id: results wait, see settle
local function release(keys, args)
  local base, shard = keys[1], keys[2]
  local meta, cid, worker, token, seen, delay = base .. ':meta', args[1], args[2], args[3], args[4], args[5]
  if not ownership.is_owner(meta, worker, token) then return {'fenced'} end
  local last = store.get(meta, 'last_id')
  if not history.remembers(base, seen, args[6]) then return {'lost', tonumber(last)} end
  if last ~= seen or results.are_waiting(base) then return {'news', tonumber(last)} end
  local owned = ownership.owned_by(shard, worker)
  redis.call('HDEL', meta, 'owner', 'rung')
  marks.clear(base)
  redis.call('SREM', owned, cid)
  if delay ~= '' then redis.call('ZADD', shard .. ':parked', store.now_ms(shard) + tonumber(delay), cid) end
  return {'released'}
end

-- due: return whether a scheduled conversation may start.  ARGV worker, token.
-- returns  {'due'} {'wait', ms} {'expired'} {'fenced'}
local function due(keys, args)
  local meta = keys[1] .. ':meta'
  if not ownership.is_owner(meta, args[1], args[2]) then return {'fenced'} end
  local now, fields = store.now_ms(keys[2]), redis.call('HMGET', meta, 'expires_ms', 'due_ms')
  local expires, begins = store.number_of(fields[1]), store.number_of(fields[2])
  if expires and expires <= now then return {'expired'} end
  if begins and begins > now then return {'wait', begins - now} end
  return {'due'}
end

-- mark: record that a step of the conversation runs ('1') or not ('0'). A death of the worker while it runs counts against
-- the conversation. '2': it waits for others, and has done all that it could do before; of the earlier deaths, only those
-- count that came after such a wait ('3').
-- ARGV  worker, token, '0' to '3'.  returns {'marked'} {'fenced'}
local function mark(keys, args)
  if not ownership.is_owner(keys[1] .. ':meta', args[1], args[2]) then return {'fenced'} end
  marks.note(keys[1], args[3])
  return {'marked'}
end

-- snapshot: store the owner's snapshot.  ARGV worker, token, bytes, id of the last event in it and its checksum
-- returns {'kept'} {'fenced'} {'lost', last}
local function snapshot(keys, args)
  if not ownership.is_owner(keys[1] .. ':meta', args[1], args[2]) then return {'fenced'} end
  if not history.remembers(keys[1], args[4], args[5]) then
    return {'lost', tonumber(store.get(keys[1] .. ':meta', 'last_id') or 0)}
  end
  redis.call('SET', keys[1] .. ':snapshot', args[3])
  return {'kept'}
end

redis.register_function('deck_claim', claim)
redis.register_function('deck_release', release)
redis.register_function('deck_due', due)
redis.register_function('deck_mark', mark)
redis.register_function('deck_snapshot', snapshot)

return ownership
