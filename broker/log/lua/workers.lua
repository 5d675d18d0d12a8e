-- Workers: register, beat, and do the due work of the whole shard with each beat.
-- While nothing is due in a shard, its workers take turns: a beat leaves the shard's work out if another worker's beat
-- found none within `QUIET_MS`.
-- Keys:  shard base  :workers              zset  worker -> when its heartbeat expires; 0: it is being removed
--                    :worker:<id>:about    hash  its facts
--                    :clock                hash  quiet -> when a beat last found nothing due, by the server's clock
--                                                quiet_for -> the worker of that beat

local actions = require('log/lua/actions')
local clock = require('log/lua/clock')
local conversations = require('log/lua/conversations')
local groups = require('log/lua/groups')
local kinds = require('log/lua/kinds')
local lost_nodes = require('log/lua/lost_nodes')
local marks = require('log/lua/marks')
local ownership = require('log/lua/ownership')
local removal = require('log/lua/removal')
local store = require('store/prelude')
local turns = require('log/lua/turns')
local wakeups = require('log/lua/wakeups')


-- Fields of a worker's hash written by beats and registration. All others are its facts.
local KEPT_BY_BEATS = {progress = true, beat_ms = true, since_ms = true, ttl_ms = true, monotonic = true, lead = true,
  clock_ms = true}

-- Write a worker's facts, from args[at] on: role, n_streams, action stream …, field, value …
-- Removes other fields that were written meanwhile. Writes nothing if nothing differs.
local function note_facts(about, args, at)
  local n = tonumber(args[at + 1])
  local facts = {'role', args[at], 'streams', table.concat(args, ' ', at + 2, at + 1 + n), unpack(args, at + 2 + n)}
  local said, flat = store.pairs_of(facts), redis.call('HGETALL', about)
  local known = store.pairs_of(flat)
  for i = 1, #flat, 2 do
    if not said[flat[i]] and not KEPT_BY_BEATS[flat[i]] then redis.call('HDEL', about, flat[i]) end
  end
  for i = 1, #facts, 2 do
    if known[facts[i]] ~= facts[i + 1] then redis.call('HSET', about, facts[i], facts[i + 1]) end
  end
end

-- register: register a new worker session.
-- KEYS shard base.  ARGV worker, ttl_ms, role, n_streams, action stream …, field, value …
--   field 'clock_ms': the clock of its machine; if it differs from the server's, one of them is wrong
--   field 'interactive': a controller that reads the interactive ready stream
-- returns {'registered', the shard's time}
local function register(keys, args)
  local shard, worker, ttl, role = keys[1], args[1], tonumber(args[2]), args[3]
  local about = shard .. ':worker:' .. worker .. ':about'
  kinds.keep(shard)
  kinds.keep_of_role(shard, role)
  groups.make(shard, shard .. ':ready', groups.CONTROLLERS)
  for i = 5, 4 + tonumber(args[4]) do groups.make(shard, args[i], groups.TOOLS) end
  if role == 'ingress' then groups.make(shard, shard .. ':notices', groups.INGRESSES) end
  note_facts(about, args, 3)
  if store.get(about, 'interactive') then groups.make(shard, shard .. ':ready:interactive', groups.CONTROLLERS) end
  local wall = store.wall_ms()
  local theirs = store.number_of(store.get(about, 'clock_ms')) or wall
  local now = clock.keep_time(shard, worker, ttl, nil, math.abs(theirs - wall) < clock.CLOCKS_DIFFER_MS)
  redis.call('ZADD', shard .. ':workers', now + ttl, worker)
  redis.call('HSET', about, 'since_ms', now, 'ttl_ms', ttl)
  return {'registered', now}
end

local QUIET_MS = 250
local REMOVALS = 4    -- of dead workers, by each beat

-- Maintain a stream: recreate its group if it was lost, give back entries that a worker got after its removal (a server
-- still serves the blocked read of a stopped process), and trim entries that are acknowledged.
-- Returns whether no worker has an entry of it.
local function maintain_stream(shard, stream, group, node)
  local found = groups.make(shard, stream, group)
  local oldest, is_taken = found['last-delivered-id'], found['pending'] > 0
  if is_taken then
    local pending = redis.call('XPENDING', stream, group)
    oldest = pending[2]
    for _, holder in ipairs(pending[4]) do
      if not store.alive(shard, holder[1]) then removal.give_back(shard, stream, group, holder[1], 256) end
    end
  end
  redis.call('XTRIM', stream, 'MINID', oldest)
  if group == groups.CONTROLLERS then turns.pump(shard, stream, group, wakeups.hand_over_ready)
  else actions.pump_actions(shard, stream, node) end
  return not is_taken
end

-- Do the work that is due in the whole shard.
-- returns workers removed, conversations woken, repeated notifications, whether nothing was due
local function do_due_work(shard, ttl, patience, now)
  local workers = shard .. ':workers'
  local removed, looked, dead = 0, 0, redis.call('ZRANGEBYSCORE', workers, '-inf', now, 'LIMIT', 0, REMOVALS * 16)
  local may_count = #dead == 0 or marks.may_count(shard)
  for _, worker in ipairs(dead) do
    if looked < REMOVALS and (may_count or redis.call('SCARD', ownership.owned_by(shard, worker)) == 0) then
      looked = looked + 1
      if store.attempt(shard, workers, worker, removal.remove, shard, worker, now, 256, 'crash') then
        removed = removed + 1
      end
    end
  end
  -- A deadline later than any beat can set was computed before a clock was set back.
  for _, other in ipairs(redis.call('ZRANGEBYSCORE', workers, now + 2 * ttl, '+inf', 'LIMIT', 0, 64)) do
    local about = shard .. ':worker:' .. other .. ':about'
    local theirs = store.is_there(shard, about, 'hash') and store.number_of(store.get(about, 'ttl_ms')) or ttl
    if tonumber(redis.call('ZSCORE', workers, other)) > now + theirs then
      redis.call('ZADD', workers, now + theirs, other)
    end
  end

  local due = redis.call('ZRANGEBYSCORE', shard .. ':parked', '-inf', now, 'LIMIT', 0, 256)
  for _, cid in ipairs(due) do
    redis.call('ZREM', shard .. ':parked', cid)
    store.attempt(shard, shard .. ':parked', cid, wakeups.wake_parked, shard, cid, now)
  end

  local notified = 0
  local unread = redis.call('ZRANGEBYSCORE', shard .. ':unread', '-inf', now - patience, 'LIMIT', 0, 64)
  for _, cid in ipairs(unread) do
    local found = store.attempt(shard, shard .. ':unread', cid, wakeups.check_notification, shard, cid, now)
    if found == 'rung' then notified = notified + 1 end
    if not found then redis.call('ZREM', shard .. ':unread', cid) end
  end

  local is_quiet = maintain_stream(shard, shard .. ':ready', groups.CONTROLLERS)
  if redis.call('EXISTS', shard .. ':ready:interactive') == 1 then
    is_quiet = maintain_stream(shard, shard .. ':ready:interactive', groups.CONTROLLERS) and is_quiet
  end
  return removed, #due, notified, is_quiet and #dead + #due + #unread == 0
end

-- tick: beat, and do all due work: remove dead workers, wake parked conversations, repeat lost notifications.
-- KEYS shard base.  ARGV worker, ttl_ms, progress (a number that grows while the worker progresses), patience_ms,
--      its monotonic clock in ms, and from time to time its facts, as in register:
--      role, n_streams, action stream …, field, value …
-- returns  {'alive', workers removed, conversations woken, repeated notifications, {expired conversation …}, shard's time}
--          {'swept'}
--          expired: for an ingress or a controller worker, which appends their end
--          swept: others have taken over everything this worker had
local function tick(keys, args)
  local shard, worker, ttl, patience = keys[1], args[1], tonumber(args[2]), tonumber(args[4])
  local workers, me = shard .. ':workers', shard .. ':worker:' .. worker
  local wall, clock_key = store.wall_ms(), shard .. ':clock'
  local kept = store.is_there(shard, clock_key, 'hash') and redis.call('HMGET', clock_key, 'quiet', 'quiet_for') or {}
  local quiet = store.number_of(kept[1])
  local is_looking = not quiet or kept[2] == worker or wall < quiet or wall - quiet >= QUIET_MS
  if is_looking then kinds.keep(shard) end
  if not store.alive(shard, worker) then return {'swept'} end
  store.is_there(shard, me .. ':mail', 'stream')
  ownership.owned_by(shard, worker)
  if not store.is_there(shard, me .. ':about', 'hash') then  -- its removal finds its work
    redis.call('ZADD', workers, store.now_ms(shard) + ttl, worker)
    return {'swept'}
  end
  local role = args[6] or store.get(me .. ':about', 'role')
  kinds.keep_of_role(shard, role)
  local monotonic = tonumber(args[5] or '')
  local now = clock.keep_time(shard, worker, ttl, monotonic, not monotonic)
  redis.call('ZADD', workers, now + ttl, worker)
  redis.call('HSET', me .. ':about', 'progress', args[3], 'beat_ms', now, 'ttl_ms', ttl)
  if args[6] then note_facts(me .. ':about', args, 6) end

  local removed, woken, notified, is_quiet = 0, 0, 0
  if is_looking then
    removed, woken, notified, is_quiet = do_due_work(shard, ttl, patience, now)
    if is_quiet then redis.call('HSET', clock_key, 'quiet', wall, 'quiet_for', worker)
    elseif quiet then redis.call('HDEL', clock_key, 'quiet') end
  end

  lost_nodes.maintain_nodes(shard, me .. ':about', now)
  if role == 'ingress' then groups.make(shard, shard .. ':notices', groups.INGRESSES) end
  local streams, node = actions.streams_of(shard, worker), store.get(me .. ':about', 'node')
  for _, stream in ipairs(streams) do maintain_stream(shard, stream, groups.TOOLS, node) end
  return {'alive', removed, woken, notified, role == 'tool' and {} or conversations.find_expired(shard, now), now}
end

redis.register_function('deck_register', register)
redis.register_function('deck_tick', tick)
