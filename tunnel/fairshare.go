package tunnel

// What one client may hold of something scarce goes by what is free of it
// (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory
// packet switches", 1998): nobody has a fixed share, one client alone may have
// nearly all, and as others come there is always some left for the next.
const (
	shareFactor = 8  // times what is free, beyond the reserve, may be held by one client
	reservePart = 32 // one part in so many is kept for those that hold little,
	littlePart  = 64 // which is up to one part in so many of what is free,
	littleMost  = 8
	littleLeast = 2 // and a tunnel in any case
)

// FairShare returns how much of something scarce one client may hold where
// there is total of it, and free of that is nobody's.
func FairShare(total, free int64) int64 {
	beyond := max(0, free-total/reservePart)
	if beyond > total/shareFactor {
		return total // and no overflow
	}
	return max(shareFactor*beyond, little(free))
}

// little is what counts as little where so much is free.
func little(free int64) int64 { return max(littleLeast, min(littleMost, free/littlePart)) }

// fair refuses n more where the client holds its share already. All clients
// together have total-free.
func (c *Client) fair(what string, total, free, n int64, held func(*Client) int64, hint string) error {
	share := FairShare(total, free)
	if share >= total {
		return nil
	}
	return c.each(func(c *Client, times int64) error {
		most := max(share, little(free)*times)
		if h := held(c); h+n > most {
			return Refusef(Overload, "%s are scarce: %d of %d are free, %s holds %d, and its share is %d now: %s", what, max(free, 0), total, c, h, most, hint)
		}
		return nil
	})
}

// Where one client holds most of the tunnels, another one may have some more
// while memory is short: it is not the one that has used it up.
const (
	muchHeld  = 64 // tunnels that a client must hold to be held against
	smallPart = 8  // one part in so many of what it holds, another one may have
)

// isOthersShortage reports whether c may have one more tunnel while memory is short. The
// sum of the squares by the sum is how many tunnels the client of a tunnel holds,
// on average: near to what one client holds if that has most of them, and little
// if all hold as many.
func (b *Budget) isOthersShortage(c *Client) bool {
	if b == nil {
		return false
	}
	tunnels := b.clients.tunnels.Load()
	if tunnels <= 0 {
		return false
	}
	much := b.clients.squares.Load() / tunnels
	if much < muchHeld {
		return false
	}
	for ; c != nil; c = c.site {
		if c.Tunnels.Load() >= much/smallPart {
			return false
		}
	}
	return true
}

// checkDescriptors refuses the client n more descriptors where the Budget is short of
// them and the client holds its share.
func (b *Budget) checkDescriptors(c *Client, n int64) error {
	if b == nil || c == nil {
		return nil
	}
	// The descriptors reserved for refusals are not shared.
	total := max(b.Limit-reservedForRefusals, b.Limit/2)
	return c.fair("descriptors", total, total-b.used.Load(), n, func(c *Client) int64 { return c.descriptors.Load() },
		"raise the limit on open files or add a gateway")
}
