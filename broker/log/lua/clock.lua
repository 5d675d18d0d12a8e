-- The shard's clock: kept by the beats of workers, whose monotonic clocks cannot jump.
-- Keys:  shard base  :clock  hash  see store.times_ms   :worker:<id>:about  hash  monotonic, lead, ttl_ms

local store = require('store/prelude')
local clock = {}

local USUAL_TTL_MS = 1700       -- how long a heartbeat holds where the store is fast
clock.CLOCKS_DIFFER_MS = 600000  -- by how much the clocks of two machines may differ that are both thought to be right

-- Time in which no worker could beat, because the store was away or its clock jumped, counts against none.
local function extend_deadlines(shard, passed)
  for _, key in ipairs({shard .. ':workers', shard .. ':nodes'}) do
    for _, name in ipairs(redis.call('ZRANGEBYSCORE', key, 1, '+inf')) do
      redis.call('ZADD', key, tonumber(redis.call('ZSCORE', key, name)) + passed, name)
    end
  end
end

-- Keep the shard's time at a beat. A worker's monotonic clock cannot jump, so where it and the server's clock disagree
-- about how long a gap between two beats was, it is right. What it says may have been long under way: `lead`, how far
-- the shard's time is ahead of it, is the least that was seen. It creeps up, so that slow drift does not count.
-- monotonic: the worker's, in ms; nil for nobody who could vouch.  is_believed: then the server's clock counts, but
-- never back.
function clock.keep_time(shard, worker, ttl, monotonic, is_believed)
  local about, wall = shard .. ':worker:' .. worker .. ':about', store.wall_ms()
  local said = store.number_of(store.get(about, 'ttl_ms')) or USUAL_TTL_MS
  local kept, mine = redis.call('HMGET', shard .. ':clock', 'wall', 'now'), {}
  if monotonic then mine = redis.call('HMGET', about, 'monotonic', 'lead') end
  local seen, least, now = store.number_of(mine[1]), store.number_of(mine[2]), wall
  if not seen then least = nil end
  local crept = least and least + (monotonic - seen) / 10
  local beat, before = store.number_of(kept[1]), store.number_of(kept[2])
  if not beat and redis.call('EXISTS', shard .. ':hooked') == 1 then
    redis.call('HSET', shard .. ':clock', 'hooked', '1')  -- the one before was lost, or moved out of the way
  end
  if beat and before then
    local step = wall - beat
    local is_gap = step < 0 or step > store.BEAT_GAP_MS
    now = before + step
    if least then
      if is_gap or now < monotonic + crept - store.BEAT_GAP_MS then now = monotonic + least end
    elseif is_gap and not is_believed then
      now = before
    end
    now = math.max(now, before)
    -- After a jump the time comes back to the server's clock, by a twentieth of what passes.
    local most = math.min(now - before, store.BEAT_GAP_MS) / 20
    now = now + math.max(-most, math.min(most, wall - now))
    -- By what this worker said before: its latest word may be a longer one, because the store has become slow for all.
    if now - before > math.min(ttl, said) / 2 then extend_deadlines(shard, math.floor(now - before)) end
  end
  if monotonic then
    local lead = math.min(now - monotonic, crept or math.huge)
    redis.call('HSET', about, 'monotonic', monotonic, 'lead', string.format('%.3f', lead))
  end
  redis.call('HSET', shard .. ':clock', 'wall', wall, 'now', string.format('%.3f', now))
  return math.floor(now)
end

-- now: the shard's time.  KEYS shard base.  returns {'now', ms}
local function now(keys)
  return {'now', store.now_ms(keys[1])}
end

redis.register_function('deck_now', now)

return clock
