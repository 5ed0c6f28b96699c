package dns
import ("context";"net";"net/netip")
type Resolver struct{}
func (*Resolver) Lookup(ctx context.Context, h string) ([]netip.Addr, error) { return net.DefaultResolver.LookupNetIP(ctx,"ip",h) }
