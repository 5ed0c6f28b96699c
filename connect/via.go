package connect

import (
	"context"
	"strings"

	"culvert.dev/tunnel"
)

// Limits of a chain of proxies. A chain that goes round without anybody's
// noticing ends here.
const (
	maxHops = 16  // entries of Via
	maxHop  = 255 // bytes of one received-by
)

type viaKey struct{}

// WithVia keeps the proxies a request came through for the Dialer that sends
// it on: a loop over two gateways is seen only where each passes on the
// other's name.
func WithVia(ctx context.Context, hops []string) context.Context {
	if len(hops) == 0 {
		return ctx
	}
	return context.WithValue(ctx, viaKey{}, hops)
}

func viaOf(ctx context.Context) []string {
	hops, _ := ctx.Value(viaKey{}).([]string)
	return hops
}

// ViaField returns the Via of a request that this gateway, whose pseudonym is
// own, sends on in ctx by a version of HTTP, such as "1.1". It is false if there is no
// gateway to name: own is "" and the request came through none.
func ViaField(ctx context.Context, version, own string) (Field, bool) {
	hops := viaOf(ctx)
	if own != "" {
		hops = append(hops[:len(hops):len(hops)], own)
	}
	return Field{"Via", version + " " + strings.Join(hops, ", "+version+" ")}, len(hops) > 0
}

// Hops returns the proxies that a request for to came through, for WithVia.
// It refuses one that names id, which has been here before, and one that came
// through too many.
func (f Fields) Hops(id string, to Authority) ([]string, error) {
	hops, loop := f.hops(id)
	switch {
	case loop:
		return nil, tunnel.Refusef(tunnel.Loop, "connect: the request for %q has been here: Via or CDN-Loop names %q", to, id)
	case len(hops) >= maxHops:
		return nil, tunnel.Refusef(tunnel.Loop, "connect: the request for %q came through %d proxies, limit %d", to, len(hops), maxHops-1)
	}
	return hops, nil
}

// hops returns the received-by of every entry of the Via fields (RFC 9110
// section 7.6.3), nearest last, and whether id is one of them or stands in
// CDN-Loop (RFC 8586). Entries that could not be sent on are left out.
func (f Fields) hops(id string) (chain []string, loop bool) {
	for _, field := range f {
		switch {
		case strings.EqualFold(field.Name, "Via"):
			for entry := range strings.SplitSeq(field.Value, ",") {
				words := strings.Fields(entry)
				if len(words) < 2 || !isHop(words[1]) {
					continue
				}
				chain = append(chain, strings.Clone(words[1]))
				loop = loop || id != "" && strings.EqualFold(words[1], id)
			}
		case strings.EqualFold(field.Name, "CDN-Loop"):
			for entry := range strings.SplitSeq(field.Value, ",") {
				who, _, _ := strings.Cut(entry, ";")
				loop = loop || id != "" && strings.EqualFold(strings.TrimSpace(who), id)
			}
		}
	}
	return chain, loop
}

// isHop reports whether s may be sent as a received-by: a pseudonym, or a
// host with or without a port.
func isHop(s string) bool {
	for i := range len(s) {
		if !isToken(s[i]) && strings.IndexByte(":[]", s[i]) < 0 {
			return false
		}
	}
	return s != "" && len(s) <= maxHop
}
