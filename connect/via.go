package connect

import (
	"context"
	"strings"
)

// Limits of a chain of proxies. A chain that goes round without anybody's
// noticing ends here.
const (
	maxHops = 16  // entries of Via
	maxHop  = 255 // bytes of one received-by
)

type viaKey struct{}

// withVia keeps the proxies a request came through for the Dialer that sends
// it on: a loop over two gateways is seen only where each passes on the
// other's name.
func withVia(ctx context.Context, hops []string) context.Context {
	if len(hops) == 0 {
		return ctx
	}
	return context.WithValue(ctx, viaKey{}, hops)
}

func viaOf(ctx context.Context) []string {
	hops, _ := ctx.Value(viaKey{}).([]string)
	return hops
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
