package command

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/dns"
	"culvert.dev/internal/gateway"
	"culvert.dev/internal/hostdns"
	"culvert.dev/internal/names"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
)

func newDNS() *cobra.Command {
	o := gatewayOptions{onlyDNS: true}
	cmd := &cobra.Command{
		Use:   "dns",
		Short: "Run a DNS server without a gateway",
		Long: `Dns answers the names of the configuration file, each as it is seen from the
network of the client, and forwards all other names to other resolvers, for
clients that may ask for them. The file needs dns:. Its listeners for streams
are ignored: they are for gateways. A gateway answers DNS too, if its file has
dns:.

The file is read again when it changes and on SIGHUP. The first SIGTERM drains:
the server is not ready from then on, and stops answering after the delay of
the drain. A second SIGTERM ends it at once.`,
		Example: `  culvert dns --config culvert.yaml
  culvert dns --config culvert.yaml --admin 127.0.0.1:9091 --log-level debug`,
		Args: args(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.config == "" {
				return usageError("give --config FILE", "nothing to answer from")
			}
			ctx, stop, now := signals(cmd.Context())
			defer stop()
			return runGateway(ctx, now, cmd.ErrOrStderr(), &o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.config, "config", "", "configuration file, YAML")
	f.StringVar(&o.admin, "admin", "", "address of the admin port: health, metrics, status, pprof; HOST:PORT on loopback, or unix:PATH")
	_ = cmd.MarkFlagFilename("config", "yaml", "yml")
	o.addRuntime(cmd)
	return cmd
}

// answersOnly takes what writes to Kubernetes out of c: a DNS server learns from
// it, and must not be the one replica of all that tells what has become of
// Gateways, which it does not serve.
func answersOnly(c *file.Config) {
	k := c.Kubernetes
	if k == nil {
		return
	}
	k.GatewayAPI, k.AuthorizationPolicies, k.ImportedServices, k.Leader = nil, nil, nil, file.Object{}
	if k.Discovery == nil {
		c.Kubernetes = nil
	}
}

// dnsServer makes what c says of DNS; nil where it says nothing.
func dnsServer(c *file.Config) (*gateway.DNS, error) {
	if c.DNS == nil {
		return nil, nil
	}
	s := &dns.Server{
		Zones: c.DNSZones(), Claimed: c.DNSClaims(), TTL: orNone(c.DNS.TTL), NegativeTTL: orNone(c.DNS.NegativeTTL),
		RecursionClients: c.DNS.RecursionClients, RateLimitExempt: c.DNS.RateLimitExempt, RateLimit: c.DNS.RateLimit,
	}
	if len(c.DNS.RecursionClients) > 0 {
		s.Forward = forwarder(c.DNS)
		if c.Agent != nil && c.Agent.DNS != nil { // in front of the host's resolvers, and as true to them as they are to it
			s.Forward.PrivateZones = []string{"."}
			if c.Agent.DNS.Install == file.InstallResolvConf {
				s.Forward.ResolvConf = hostdns.Saved(resolvConf)
			}
			for _, host := range c.AgentHosts() { // which may be in the agent's own zones
				if s.Forward.Zones == nil {
					s.Forward.Zones = map[string][]dns.Upstream{}
				}
				s.Forward.Zones[host] = nil
			}
		}
	}
	d := &gateway.DNS{Server: s, VIPs: dnsVIPs(c), DeferIdentity: c.DNS.UnidentifiedCallers == "defer", Local: localNames(c)}
	for _, l := range c.DNS.Listeners {
		d.Listeners = append(d.Listeners, gateway.DNSListener{Transport: dns.Transport(l.Transport), Address: l.Address, View: l.View})
	}
	if c.DNS.Certificate == (file.KeyPair{}) {
		return d, nil
	}
	pair, err := c.DNS.Certificate.X509()
	if err != nil {
		return nil, fmt.Errorf("dns: certificate: %w", err)
	}
	d.Use(pair)
	return d, nil
}

// namesSource returns what a gateway of c would answer by DNS.
func namesSource(r *registry.Registry, c *file.Config) *names.Source {
	local := localNames(c)
	return &names.Source{
		Registry: r, VIPs: dnsVIPs(c), DeferIdentity: func() bool { return c.DNS != nil && c.DNS.UnidentifiedCallers == "defer" },
		Local: func() *names.Local { return local },
	}
}

// localNames is what an agent of c answers; nil where c is no agent that answers by DNS.
func localNames(c *file.Config) *names.Local {
	if c.Agent == nil || c.Agent.DNS == nil {
		return nil
	}
	return &names.Local{Addrs: c.ForwardAddrs, Any: slices.Contains(c.DNSZones(), ""), Own: c.AgentOwns}
}

// dnsVIPs says which networks are told of VIPs; nil where none is.
func dnsVIPs(c *file.Config) func(network string) bool {
	if c.DNS == nil || len(c.DNS.VIPNetworks) == 0 {
		return nil
	}
	return func(network string) bool { return slices.Contains(c.DNS.VIPNetworks, network) }
}

// forwarding is what of c a forwarder is made of.
func forwarding(c *file.DNS) *file.DNS {
	return &file.DNS{Upstreams: c.Upstreams, Forward: c.Forward, PrivateZones: c.PrivateZones, Cache: c.Cache}
}

// forwarder is who has other resolvers answer.
func forwarder(c *file.DNS) *dns.Forwarder {
	upstreams := func(list []file.DNSUpstream) (ups []dns.Upstream) {
		for _, u := range list {
			up := dns.Upstream{Addr: u.Address}
			if u.TLS {
				up.TLS = &tls.Config{ServerName: u.Name}
				if host, _, err := net.SplitHostPort(u.Address); err == nil && u.Name == "" {
					up.TLS.ServerName = host // its certificate has the address
				}
			}
			ups = append(ups, up)
		}
		return ups
	}
	f := &dns.Forwarder{
		Upstreams: upstreams(c.Upstreams), PrivateZones: c.PrivateZones, CacheBytes: int(c.Cache.Size),
		MinTTL: orNone(c.Cache.MinTTL), MaxTTL: max(c.Cache.MaxTTL, time.Second), MaxStale: orNone(c.Cache.MaxStale),
	}
	for _, z := range c.Forward {
		if f.Zones == nil {
			f.Zones = map[string][]dns.Upstream{}
		}
		f.Zones[z.Zone] = upstreams(z.Upstreams)
	}
	return f
}

// dnsError adds to an error of a listener what is known of port 53.
func dnsError(err error) error {
	e, ok := errors.AsType[*gateway.DNSError](err)
	if !ok {
		return err
	}
	_, port, _ := net.SplitHostPort(e.Listener.Address)
	hint := ""
	switch {
	case errors.Is(err, fs.ErrPermission):
		hint = fmt.Sprintf("ports below 1024 need root or CAP_NET_BIND_SERVICE: AmbientCapabilities= in a systemd unit, or setcap cap_net_bind_service=ep; or listen at another port than %s, and redirect port 53", port)
	case errors.Is(err, syscall.EADDRINUSE) && port == "53":
		hint = "another resolver listens there: systemd-resolved has 127.0.0.53 and 127.0.0.54, so list the addresses of this machine in place of \":53\", or write DNSStubListener=no in resolved.conf"
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		hint = "this machine does not have the address; write \":" + port + "\" for all of them"
	}
	return &cliError{err: err, hint: hint, code: exitFailed}
}
