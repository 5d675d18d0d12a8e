-- The quotas of models: decide which calls may be made now, and order those that wait. A pool is a model with all its keys.
--
-- Every function takes KEYS pool base, shard base (one hash slot) and derives the real keys from them:
--   pool base  deck:{0}:quota:<pool>   :limits :set :level:<key> :warm:<key> :held :called :about :waiting:<priority>
--                                      :shares:<priority> :state; further ones in replicas.lua
--   shard base deck:{0}                :workers
-- Priority 0 is interactive, 1 normal, 2 batch. Amounts are {requests, input, output, tokens}. Times are milliseconds.
--
-- A call carries the fencing token of its conversation's owner. A former owner cannot change a later one's reservation.
--
-- A key's levels are token buckets with limits per minute. A bucket holds `burst` seconds' worth and fills so much slower
-- that no sixty seconds ever exceed the limit. The actual usage of a call is settled after it, and may leave a debt. The
-- fair queue (fair_queue.lua) orders waiting calls; a priority is one of its classes, and a grant is a turn.
-- If the keys are engines (replicas.lua), calls of conversations that are resident nowhere wait in a second queue, `cold`.

local fair_queue = require('limits/fair_queue')
local replicas = require('limits/replicas')
local store = require('store/prelude')

local MINUTELY = {'requests', 'input', 'output', 'tokens'}
-- The limits that an operator may set instead of the published ones, which must be there.
local SETTABLE = {requests = true, input = true, output = true, tokens = true, concurrency = true, day_requests = true,
  day_tokens = true}
local SWEEP_MS = 500
local PUMP_MS = 500            -- how long one worker does the timely wake-ups for all
local WARM_MS = 300000         -- how long providers keep a prompt in their caches
local WARM_WAIT_MS = 2000      -- how long to wait for a key with a warm cache while another key is free
local LEAST_FACTOR, DECREASE, INCREASE_PER_MS = 0.1, 0.8, 0.00002
local NO_RETRY_AFTER_MS = 1000
local MAX_GRANTS = 64
local MAX_OWED = 32            -- waiting conversations that are looked at for a tenant that is owed a turn

local KINDS = {limits = 'hash', set = 'hash', held = 'hash', called = 'zset', about = 'hash', state = 'hash',
  ['waiting:0'] = 'zset', ['waiting:1'] = 'zset', ['waiting:2'] = 'zset',
  ['shares:0'] = 'hash', ['shares:1'] = 'hash', ['shares:2'] = 'hash',
  ['cold:0'] = 'zset', ['cold:1'] = 'zset', ['cold:2'] = 'zset',
  ['coldshares:0'] = 'hash', ['coldshares:1'] = 'hash', ['coldshares:2'] = 'hash', served = 'hash'}


-- The capacity of a bucket, and its refill rate per millisecond.
local function size_of(key, what)
  return math.max(1, key.limits[what] * key.limits.burst / 60)
end

local function flow_of(key, what)
  local rest = key.limits[what] - size_of(key, what)
  if rest <= 0 then rest = key.limits[what] end
  return rest * key.level.factor / 60000
end

local function day_of(key, now)
  return math.floor((now - key.limits.day_start * 1000) / 86400000)
end

-- Read a pool with its current levels. Returns nil if its limits were never published.
local function open(base, now)
  local published = store.pairs_of(redis.call('HGETALL', base .. ':limits'))
  if not published['keys'] then return nil end
  local state = store.pairs_of(redis.call('HGETALL', base .. ':state'))
  local set = store.pairs_of(redis.call('HGETALL', base .. ':set'))
  local pool = {base = base, now = now, keys = {}, by_name = {}, state = state}
  for name in string.gmatch(published['keys'], '%S+') do
    local key = {name = name, limits = {}, level = {}}
    if not published[name] then return nil end
    for what, value in string.gmatch(published[name], '([%w_]+)=([%d.]+)') do key.limits[what] = tonumber(value) end
    for what, value in string.gmatch(set[name] or '', '([%w_]+)=([%d.]+)') do
      if key.limits[what] and SETTABLE[what] then key.limits[what] = math.max(1, tonumber(value) or key.limits[what]) end
    end
    -- Invalid limits count as missing: they are published again.
    if not (key.limits.burst and key.limits.day_start) then return nil end
    for what, value in pairs(store.pairs_of(redis.call('HGETALL', base .. ':level:' .. name))) do
      key.level[what] = tonumber(value)
    end
    local level = key.level
    level.in_flight, level.took, level.blocked = level.in_flight or 0, level.took or 1000, level.blocked or 0
    level.factor, level.cut = level.factor or 1, level.cut or 0
    local passed = math.max(0, now - (level.at or now))
    local unblocked = math.max(0, now - math.max(level.at or now, level.blocked))
    level.factor = math.min(1, level.factor + unblocked * INCREASE_PER_MS)
    for _, what in ipairs(MINUTELY) do
      if key.limits[what] then
        local size = size_of(key, what)
        level[what] = math.min(size, (level[what] or size) + passed * flow_of(key, what))
      end
    end
    local day = day_of(key, now)
    if level.day ~= day or not level.day_requests or not level.day_tokens then
      level.day, level.day_requests, level.day_tokens = day, 0, 0
    end
    level.at = now
    pool.has_replicas = pool.has_replicas or key.limits.replica ~= nil
    pool.keys[#pool.keys + 1] = key
    pool.by_name[name] = key
  end
  return pool
end

local function number_text(value)
  if value == math.floor(value) then return string.format('%.0f', value) end
  return string.format('%.6f', value)
end

local function save(pool)
  for _, key in ipairs(pool.keys) do
    local update = {}
    for what, value in pairs(key.level) do
      update[#update + 1] = what
      update[#update + 1] = number_text(value)
    end
    redis.call('HSET', pool.base .. ':level:' .. key.name, unpack(update))
  end
  local update = {}
  for what, value in pairs(pool.state) do
    update[#update + 1] = what
    update[#update + 1] = tostring(value)
  end
  if #update > 0 then redis.call('HSET', pool.base .. ':state', unpack(update)) end
end

local function amounts(input, output)
  return {requests = 1, input = input, output = output, tokens = input + output}
end

local NOTHING = {requests = 0, input = 0, output = 0, tokens = 0}

-- The time in ms until a key can serve a call; 0 if it can now.
-- returned: amounts that the caller already holds of this key, if any
local function wait_of(key, wanted, now, returned)
  local limits, level, had = key.limits, key.level, returned or NOTHING
  local wait = math.max(0, level.blocked - now, (level.down or 0) - now)
  for _, what in ipairs(MINUTELY) do
    if limits[what] then
      -- A call larger than the bucket goes when the bucket is full, and leaves a debt.
      local lacking = math.min(wanted[what], size_of(key, what)) - level[what] - had[what]
      if lacking > 0 then wait = math.max(wait, math.ceil(lacking / flow_of(key, what))) end
    end
  end
  local slots = replicas.slots_of(key)
  if slots and level.in_flight >= slots then wait = math.max(wait, math.ceil(level.took / slots), 1) end
  local is_day_over = (limits.day_requests and level.day_requests - had.requests >= limits.day_requests)
    or (limits.day_tokens and level.day_tokens - had.tokens >= limits.day_tokens)
  if is_day_over then
    wait = math.max(wait, (level.day + 1) * 86400000 + limits.day_start * 1000 - now)
  end
  return wait
end

-- The interval in ms between two such calls in steady operation.
local function interval_of(key, wanted)
  local interval = 0
  for _, what in ipairs(MINUTELY) do
    if key.limits[what] then interval = math.max(interval, wanted[what] / flow_of(key, what)) end
  end
  local slots = replicas.slots_of(key)
  if slots then interval = math.max(interval, key.level.took / slots) end
  return interval
end

local function add(key, wanted, sign)
  local level = key.level
  for _, what in ipairs(MINUTELY) do
    if key.limits[what] then level[what] = math.min(size_of(key, what), level[what] + sign * wanted[what]) end
  end
  level.day_requests = math.max(0, level.day_requests - sign * wanted.requests)
  level.day_tokens = math.max(0, level.day_tokens - sign * wanted.tokens)
end

-- The difference of two amounts. Adding and then subtracting would lose the part above a full bucket.
local function less(amount, used)
  local rest = {}
  for what in pairs(NOTHING) do rest[what] = amount[what] - used[what] end
  return rest
end

-- Choose the key for a conversation. Returns it; or nil, the wait in ms, and who has to wait: 'it' alone, 'cold' for all
-- that are resident nowhere, 'all'.
local function choose(pool, cid, waiter, is_owed)
  local best, least, home, home_wait
  local wanted = waiter.wanted
  if pool.has_replicas then
    return replicas.choose(pool, cid, waiter, function(key) return wait_of(key, wanted, pool.now) end, is_owed)
  end
  for _, key in ipairs(pool.keys) do
    local wait = wait_of(key, wanted, pool.now)
    if #pool.keys > 1 then
      local used = redis.call('ZSCORE', pool.base .. ':warm:' .. key.name, cid)
      if used and pool.now - tonumber(used) < WARM_MS then home, home_wait = key, wait end
    end
    if not least or wait < least then least = wait end
    if wait == 0 and (not best or key.level.in_flight < best.level.in_flight) then best = key end
  end
  if home and home_wait == 0 then return home end
  if home and best and home_wait <= WARM_WAIT_MS then return nil, home_wait, 'it' end
  return best, least, 'all'
end

local WARM, COLD = 'waiting', 'cold'

local function queue(pool, priority, line)
  return pool.base .. ':' .. (line or WARM) .. ':' .. priority
end

local function shares_of(pool, priority, line)
  return pool.base .. (line == COLD and ':coldshares:' or ':shares:') .. priority
end

-- held: '<key> <worker or -> <input> <output> <since> <token>'
local function held_by(pool, cid)
  local text = store.get(pool.base .. ':held', cid)
  if not text then return nil end
  local key, worker, input, output, since, token = string.match(text, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%d+)$')
  if not (tonumber(input) and tonumber(output) and tonumber(since)) then
    redis.call('HDEL', pool.base .. ':held', cid)
    return nil
  end
  return {key = pool.by_name[key], name = key, worker = worker, since = tonumber(since), token = store.number_of(token) or 0,
    wanted = amounts(tonumber(input), tonumber(output))}
end

local function hold(pool, cid, key, worker, wanted, token)
  redis.call('HSET', pool.base .. ':held', cid, table.concat({key, worker, number_text(wanted.input),
    number_text(wanted.output), number_text(pool.now), number_text(token)}, ' '))
end

local function free(pool, cid, held)
  redis.call('HDEL', pool.base .. ':held', cid)
  redis.call('ZREM', pool.base .. ':called', cid)
  if held.key then held.key.level.in_flight = math.max(0, held.key.level.in_flight - 1) end
end

-- about: '<priority> <place> <input> <output> <calls> <token>', and at replicas ' <line> <prefix or -> <weight> <tenant>'
local function about(pool, cid)
  local text = store.get(pool.base .. ':about', cid)
  if not text then return nil end
  local priority, place, input, output, calls, token, further =
    string.match(text, '^([012]) (%S+) (%S+) (%S+) (%d+) (%d+)(.*)$')
  if not (tonumber(place) and tonumber(input) and tonumber(output)) then
    redis.call('HDEL', pool.base .. ':about', cid)
    return nil
  end
  local line, prefix, weight, tenant = string.match(further, '^ (%l+) (%S+) (%S+) (.*)$')
  return {priority = priority, place = place, calls = tonumber(calls), token = store.number_of(token) or 0,
    line = line == COLD and COLD or WARM, prefix = prefix ~= '-' and prefix or '', weight = tonumber(weight) or 1,
    tenant = tenant or '',
    wanted = amounts(tonumber(input), tonumber(output))}
end

local function note(pool, cid, waiter)
  local text = table.concat({waiter.priority, waiter.place, number_text(waiter.wanted.input),
    number_text(waiter.wanted.output), waiter.calls, number_text(waiter.token)}, ' ')
  if pool.has_replicas then
    local prefix = waiter.prefix ~= '' and waiter.prefix or '-'
    text = table.concat({text, waiter.line, prefix, number_text(waiter.weight), waiter.tenant}, ' ')
  end
  redis.call('HSET', pool.base .. ':about', cid, text)
end

local function queue_up(pool, cid, waiter)
  fair_queue.join(queue(pool, waiter.priority, waiter.line), cid, waiter.place)
  note(pool, cid, waiter)
end

-- Let a call wait in the queue of residents or in that of others, with a new place.
local function line_up(pool, cid, waiter, line)
  if waiter.line and waiter.line ~= line then
    fair_queue.leave(queue(pool, waiter.priority, waiter.line), cid)
  end
  local shares = shares_of(pool, waiter.priority, line)
  waiter.line = line
  waiter.place = fair_queue.charge(shares, waiter.tenant, waiter.weight, fair_queue.places_of(shares, waiter.tenant))
  queue_up(pool, cid, waiter)
end

-- Whether a later owner holds a permit or waits for one.
local function is_fenced(token, held, waiter)
  return (held and held.token > token) or (waiter and waiter.token > token)
end

local function forget(pool, cid)
  redis.call('HDEL', pool.base .. ':about', cid)
  for _, priority in ipairs(fair_queue.CLASSES) do
    fair_queue.leave(queue(pool, priority), cid)
    if pool.has_replicas then fair_queue.leave(queue(pool, priority, COLD), cid) end
  end
end

-- A woken conversation that does not respond loses its grant. It is woken again with its old place, but not for ever.
local function take_back(pool)
  local late = redis.call('ZRANGEBYSCORE', pool.base .. ':called', '-inf', pool.now, 'LIMIT', 0, MAX_GRANTS)
  for _, cid in ipairs(late) do
    local held, waiter = held_by(pool, cid), about(pool, cid)
    if held then
      free(pool, cid, held)
      if held.key then add(held.key, held.wanted, 1) end
    end
    redis.call('ZREM', pool.base .. ':called', cid)
    if waiter and waiter.calls < fair_queue.MAX_WAKES then queue_up(pool, cid, waiter) else forget(pool, cid) end
  end
end

-- Release the permits of dead workers. Their calls may have been made, so only the concurrency is freed, not the amounts.
local function sweep(pool, shard)
  if pool.now - (tonumber(pool.state.swept) or 0) < SWEEP_MS then return end
  pool.state.swept = number_text(pool.now)
  local is_alive, flat = {['-'] = true}, redis.call('HGETALL', pool.base .. ':held')
  for _, key in ipairs(pool.keys) do key.level.in_flight = 0 end
  for i = 1, #flat, 2 do
    local held = held_by(pool, flat[i])
    if held then
      if is_alive[held.worker] == nil then is_alive[held.worker] = store.alive(shard, held.worker) end
      if held.key then held.key.level.in_flight = held.key.level.in_flight + 1 end
      -- A grant without a worker expires, even if `:called` was overwritten.
      if held.worker == '-' and not redis.call('ZSCORE', pool.base .. ':called', flat[i]) then
        redis.call('ZADD', pool.base .. ':called', pool.now + fair_queue.PATIENCE_MS, flat[i])
      end
      if not is_alive[held.worker] then free(pool, flat[i], held) end
    end
  end
  if pool.has_replicas then
    replicas.sweep(pool)
  else
    for _, key in ipairs(pool.keys) do
      redis.call('ZREMRANGEBYSCORE', pool.base .. ':warm:' .. key.name, '-inf', pool.now - WARM_MS)
    end
  end
end

-- Grant a call to a waiting conversation, which the caller wakes.
local function grant(pool, cid, waiter, key, priority)
  add(key, waiter.wanted, -1)
  key.level.in_flight = key.level.in_flight + 1
  hold(pool, cid, key.name, '-', waiter.wanted, waiter.token)
  fair_queue.advance(shares_of(pool, priority, waiter.line), waiter.place)
  waiter.calls = waiter.calls + 1
  queue_up(pool, cid, waiter)
  fair_queue.leave(queue(pool, priority, waiter.line), cid)
  if pool.has_replicas then
    replicas.stay(pool, key, cid, waiter.wanted.input + waiter.wanted.output, waiter.tenant)
    replicas.note_prefix(pool, key, waiter.prefix)
    replicas.serve(pool, waiter)
  end
  redis.call('ZADD', pool.base .. ':called', pool.now + fair_queue.PATIENCE_MS, cid)
  pool.state.grants = number_text((tonumber(pool.state.grants) or 0) + 1)
end

-- The waiting conversations of a priority: residents of engines first, unless a tenant of the others is owed a turn.
local function line_of(pool, priority)
  local waiting, is_whole = fair_queue.scan(queue(pool, priority))
  local line = {waiting = waiting, at = 1, is_whole = is_whole, is_owed = {}}
  if not pool.has_replicas then return line end
  local cold, owed = fair_queue.scan(queue(pool, priority, COLD)), nil
  for at, cid in ipairs(cold) do
    local waiter = at <= MAX_OWED and about(pool, cid)
    if waiter and not owed and replicas.is_owed(pool, waiter.tenant) then
      owed = cid
    else
      waiting[#waiting + 1] = cid
    end
  end
  if owed then
    table.insert(waiting, 1, owed)
    line.is_owed[owed] = true
  end
  return line
end

-- The waiting conversations by priority, with a position in each list.
local function lines_of(pool)
  local lines = {}
  for _, priority in ipairs(fair_queue.CLASSES) do lines[priority] = line_of(pool, priority) end
  return lines
end

-- The next waiting conversation, and its priority; nil at the end of the lists.
local function next_of(pool, lines)
  for _, priority in ipairs((fair_queue.classes_at((tonumber(pool.state.grants) or 0) + 1))) do
    local line = lines[priority]
    local cid = line.waiting[line.at]
    if cid then
      line.at = line.at + 1
      return cid, priority
    end
    if not line.is_whole then return nil, priority end  -- there are more, whose turn it is
  end
  return nil
end

-- Grant all possible calls, in order. Returns the conversations to wake, and the ms until the next grant; nil if none
-- waits.
local function pump(pool, shard)
  take_back(pool)
  sweep(pool, shard)
  local woken, next_ms, lines, is_cold_full = {}, nil, lines_of(pool), false
  while true do
    local cid, priority = next_of(pool, lines)
    if not cid then
      if priority then return woken, next_ms or 0 end
      break
    end
    local waiter = about(pool, cid)
    local key, wait, who
    if waiter and waiter.line == WARM and pool.has_replicas and not replicas.home_of(pool, cid) then
      line_up(pool, cid, waiter, COLD)  -- it has lost its place in a cache meanwhile
    end
    local is_owed = lines[priority].is_owed[cid]
    -- No overtaking among those that need room in a cache.
    local is_skipped = waiter and waiter.line == COLD and is_cold_full and not is_owed
    if waiter and not is_skipped then key, wait, who = choose(pool, cid, waiter, is_owed) end
    if not waiter then
      forget(pool, cid)
    elseif is_skipped then
      next_ms = next_ms or PUMP_MS
    elseif key then
      grant(pool, cid, waiter, key, priority)
      woken[#woken + 1] = cid
    else
      next_ms = math.min(next_ms or wait, wait)
      -- No overtaking: if smaller calls went first, this one could wait for ever.
      if who == 'all' then return woken, next_ms end
      is_cold_full = is_cold_full or who == 'cold'
    end
  end
  if redis.call('ZCARD', pool.base .. ':called') == 0 then
    for _, priority in ipairs(fair_queue.CLASSES) do
      if #lines[priority].waiting == 0 then
        redis.call('DEL', shares_of(pool, priority), shares_of(pool, priority, COLD))
      end
    end
  end
  return woken, next_ms
end

-- Only one worker gets the exact time, so that a thousand workers do not come for one permit.
local function next_for(pool, worker, next_ms)
  local waiting = redis.call('ZCARD', pool.base .. ':called')
  if not next_ms then
    if waiting > 0 then return PUMP_MS end
    return -1
  end
  if pool.state.pump ~= worker and pool.now < (tonumber(pool.state.pump_ms) or 0) then return PUMP_MS end
  pool.state.pump, pool.state.pump_ms = worker, number_text(pool.now + PUMP_MS)
  return next_ms
end

local function reply(pool, worker, outcome, woken, next_ms)
  local answer = {outcome[1], next_for(pool, worker, next_ms), outcome[2] or '', outcome[3] or 0}
  save(pool)
  for _, cid in ipairs(woken) do answer[#answer + 1] = cid end
  return answer
end

-- deck_quota_publish: set the limits of a pool.  ARGV key, limits as 'name=number …', key, limits …
-- returns {'published'}
local function publish(keys, args)
  local limits, names = keys[1] .. ':limits', {}
  redis.call('DEL', limits)
  for i = 1, #args, 2 do
    names[#names + 1] = args[i]
    redis.call('HSET', limits, args[i], args[i + 1])
  end
  redis.call('HSET', limits, 'keys', table.concat(names, ' '))
  return {'published'}
end

-- deck_quota_set: set limits of a key instead of the published ones, until they are removed; publishing keeps them.
-- ARGV key, the set limits as the caller knows them, new ones as 'name=number …' ('' removes them, also of a key that
--   is no longer published)
-- returns {'set'}  {'changed', the set limits}: they are others than the caller knows  {'unknown'}: there is no such key
local function set_limits(keys, args)
  local name, known, wanted = args[1], args[2], args[3]
  store.is_there(keys[2], keys[1] .. ':set', 'hash')
  if wanted ~= '' and not store.get(keys[1] .. ':limits', name) then return {'unknown'} end
  local there = store.get(keys[1] .. ':set', name) or ''
  if there ~= known then return {'changed', there} end
  if wanted == '' then
    redis.call('HDEL', keys[1] .. ':set', name)
  else
    redis.call('HSET', keys[1] .. ':set', name, wanted)
  end
  return {'set'}
end

local function enter(pool, cid, args, token)
  local line = pool.has_replicas and not replicas.home_of(pool, cid) and COLD or WARM
  line_up(pool, cid, {priority = args[5], calls = 0, token = token, prefix = args[9] or '', tenant = args[6],
    weight = tonumber(args[7]), wanted = amounts(tonumber(args[3]), tonumber(args[4]))}, line)
end

-- A repeated request may need more or less than before, because the prompt has changed. If its grant is now too small, it
-- is given back, and the conversation waits with its old place. Returns the grant that remains.
local function resize(pool, cid, held, wanted, token)
  local waiter = about(pool, cid)
  if waiter then
    waiter.wanted, waiter.token = wanted, token
    note(pool, cid, waiter)
    if not held then
      if fair_queue.place_in(queue(pool, waiter.priority, waiter.line), cid) then queue_up(pool, cid, waiter) end
      return nil
    end
  end
  if not held or not held.key then return held end
  if held.wanted.input == wanted.input and held.wanted.output == wanted.output then return held end
  free(pool, cid, held)
  if held.worker == '-' and waiter and wait_of(held.key, wanted, pool.now, held.wanted) > 0 then
    add(held.key, held.wanted, 1)
    queue_up(pool, cid, waiter)
    return nil
  end
  add(held.key, less(held.wanted, wanted), 1)
  held.key.level.in_flight = held.key.level.in_flight + 1
  hold(pool, cid, held.name, held.worker, wanted, token)
  held.wanted = wanted
  return held
end

-- deck_quota_reserve: reserve a call of a conversation. If it must wait, it is queued and woken in its turn.
-- ARGV cid, worker, input tokens, output tokens, priority, tenant, weight, token, hash of its first prompt (or none)
-- returns {'granted', next_ms, key, 0, woken …} {'waiting', next_ms, '', estimated wait in ms, woken …} {'unknown'}
--         {'fenced', next_ms, '', 0, woken …}: a later owner has asked already
local function reserve(keys, args)
  local pool = open(keys[1], store.now_ms(keys[2]))
  if not pool then return {'unknown'} end
  local shard, cid, worker = keys[2], args[1], args[2]
  local token, held, waiter = tonumber(args[8]), held_by(pool, cid), about(pool, cid)
  if is_fenced(token, held, waiter) then
    local woken, next_ms = pump(pool, shard)
    return reply(pool, worker, {'fenced'}, woken, next_ms)
  end
  if held and held.worker ~= '-' and (held.worker ~= worker or held.token < token) then
    free(pool, cid, held)  -- of a former owner, which may have made the call
    held = nil
  end
  held = resize(pool, cid, held, amounts(tonumber(args[3]), tonumber(args[4])), token)
  waiter = about(pool, cid)
  if not held and not waiter then enter(pool, cid, args, token) end
  if not held and waiter and not fair_queue.place_in(queue(pool, waiter.priority, waiter.line), cid) then
    queue_up(pool, cid, waiter)  -- the queue was overwritten
  end
  local woken, next_ms = pump(pool, shard)
  held = held_by(pool, cid)
  if held then
    hold(pool, cid, held.name, worker, held.wanted, token)
    redis.call('ZREM', pool.base .. ':called', cid)
    forget(pool, cid)
    local others = {}
    for _, other in ipairs(woken) do if other ~= cid then others[#others + 1] = other end end
    return reply(pool, worker, {'granted', held.name}, others, next_ms)
  end
  waiter = about(pool, cid)
  local ahead = redis.call('ZRANK', queue(pool, waiter.priority, waiter.line), cid) or 0
  for before = 0, tonumber(waiter.priority) - 1 do ahead = ahead + redis.call('ZCARD', queue(pool, before)) end
  local first, pace = nil, 0
  for _, key in ipairs(pool.keys) do
    local wait = wait_of(key, waiter.wanted, pool.now)
    if not first or wait < first then first = wait end
    pace = pace + 1 / math.max(interval_of(key, waiter.wanted), 0.001)
  end
  return reply(pool, worker, {'waiting', '', math.ceil(first + ahead / pace)}, woken, next_ms)
end

-- deck_quota_settle: release a reservation and record the outcome of the call.
-- ARGV cid, worker, outcome, input tokens, output tokens, the provider's retry-after in ms or '', took_ms, token
--   outcome 'ok': the tokens were used; 'failed': the same, no reply; 'limited': refused for the quota; 'unsent': never
--   sent; 'down': the engine of a replica does not answer
-- returns {'settled', next_ms, key, 0, woken …} {'gone', next_ms, '', 0, woken …} {'unknown'}
local function settle(keys, args)
  local pool = open(keys[1], store.now_ms(keys[2]))
  if not pool then return {'unknown'} end
  local shard, cid, worker, outcome = keys[2], args[1], args[2], args[3]
  local held, result = held_by(pool, cid), {'gone'}
  if held and held.worker == worker and held.token == tonumber(args[8]) then
    result = {'settled', held.name}
    free(pool, cid, held)
    local key = held.key
    if key then
      local level = key.level
      if outcome == 'unsent' then
        add(key, held.wanted, 1)
      else
        add(key, less(held.wanted, amounts(tonumber(args[4]), tonumber(args[5]))), 1)
      end
      if outcome == 'ok' then
        level.took = level.took + (tonumber(args[7]) - level.took) / 8
        if pool.has_replicas then
          local input, output = tonumber(args[4]), tonumber(args[5])
          replicas.stay(pool, key, cid, input + output)
          replicas.learn(key, tonumber(args[7]), output)
        elseif #pool.keys > 1 then
          redis.call('ZADD', pool.base .. ':warm:' .. key.name, pool.now, cid)
        end
      elseif outcome == 'limited' then
        -- Calls that were in flight together are refused together: that counts once.
        if held.since > level.cut then
          level.factor, level.cut = math.max(LEAST_FACTOR, level.factor * DECREASE), pool.now
        end
        if key.limits.replica and held.since > (level.shrunk or 0) then replicas.shrink(pool, key) end
        local asked = args[6] == '' and NO_RETRY_AFTER_MS or tonumber(args[6])
        level.blocked = math.max(level.blocked, pool.now + asked)
      elseif outcome == 'down' and key.limits.replica then
        replicas.set_down(pool, key)
      end
    end
  end
  local woken, next_ms = pump(pool, shard)
  return reply(pool, worker, result, woken, next_ms)
end

-- deck_quota_told: apply the remaining amounts in a provider's headers.  ARGV key, worker, name, amount, name, amount …
-- returns {'told', next_ms, '', 0, woken …} {'unknown'}
local function report_left(keys, args)
  local pool = open(keys[1], store.now_ms(keys[2]))
  if not pool then return {'unknown'} end
  local key = pool.by_name[args[1]]
  for i = 3, #args, 2 do
    local what, left = args[i], tonumber(args[i + 1])
    if key and key.limits[what] then key.level[what] = math.min(key.level[what], left) end
  end
  local woken, next_ms = pump(pool, keys[2])
  return reply(pool, args[2], {'told'}, woken, next_ms)
end

-- deck_quota_told_engine: record what an engine reports of itself, or that it does not answer.
-- ARGV key, worker, 'up' or 'down', tokens that its cache holds (or ''), the used part of it (or '')
-- or   key, worker, 'claim', ms: may this worker ask the engine? One may, each so many ms
-- returns {'told', next_ms, '', 0, woken …} {'claimed', next_ms, '', 0, woken …}: it may  {'unknown'}
local function report_engine(keys, args)
  local pool = open(keys[1], store.now_ms(keys[2]))
  if not pool then return {'unknown'} end
  local key = pool.by_name[args[1]]
  local result = 'told'
  if key and key.limits.replica then
    if args[3] ~= 'claim' then
      replicas.note_report(pool, key, args[3] == 'up', args[4], args[5])
    elseif replicas.claim_report(pool, key, tonumber(args[4])) then
      result = 'claimed'
    end
  end
  local woken, next_ms = pump(pool, keys[2])
  return reply(pool, args[2], {result}, woken, next_ms)
end

-- deck_quota_withdraw: remove a waiting conversation from the queue.  ARGV cid, worker, token, 'over' if it ends (or none)
-- returns {'withdrawn', next_ms, '', 0, woken …} {'fenced', next_ms, '', 0, woken …}: a later owner waits  {'unknown'}
local function withdraw(keys, args)
  local pool = open(keys[1], store.now_ms(keys[2]))
  if not pool then return {'unknown'} end
  local cid, held = args[1], held_by(pool, args[1])
  local has_later = is_fenced(tonumber(args[3]), held, about(pool, cid))
  if not has_later then
    if held and held.worker == '-' then
      free(pool, cid, held)
      if held.key then add(held.key, held.wanted, 1) end
    end
    forget(pool, cid)
    if args[4] == 'over' then replicas.leave(pool, cid) end
  end
  local woken, next_ms = pump(pool, keys[2])
  return reply(pool, args[2], {has_later and 'fenced' or 'withdrawn'}, woken, next_ms)
end

-- deck_quota_pump: wake the conversations whose turn it is, and move keys of another type away.  ARGV worker.
-- returns {'pumped', next_ms, '', 0, woken …} {'unknown'}
local function pump_for(keys, args)
  for name, kind in pairs(KINDS) do store.is_there(keys[2], keys[1] .. ':' .. name, kind) end
  for name in string.gmatch(store.get(keys[1] .. ':limits', 'keys') or '', '%S+') do
    store.is_there(keys[2], keys[1] .. ':level:' .. name, 'hash')
    for kind, type in pairs({warm = 'zset', prefixes = 'zset', sizes = 'hash'}) do
      store.is_there(keys[2], keys[1] .. ':' .. kind .. ':' .. name, type)
    end
  end
  local pool = open(keys[1], store.now_ms(keys[2]))
  if not pool then return {'unknown'} end
  local woken, next_ms = pump(pool, keys[2])
  return reply(pool, args[1], {'pumped'}, woken, next_ms)
end

redis.register_function('deck_quota_publish', publish)
redis.register_function('deck_quota_set', set_limits)
redis.register_function('deck_quota_reserve', reserve)
redis.register_function('deck_quota_settle', settle)
redis.register_function('deck_quota_told', report_left)
redis.register_function('deck_quota_told_engine', report_engine)
redis.register_function('deck_quota_withdraw', withdraw)
redis.register_function('deck_quota_pump', pump_for)
