package command

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/dns"
	"culvert.dev/identity"
	"culvert.dev/identity/jwt"
	"culvert.dev/internal/activation"
	"culvert.dev/internal/admin"
	"culvert.dev/internal/gateway"
	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/internal/udp"
	"culvert.dev/internal/unixsocket"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
	"culvert.dev/reverse"
	"culvert.dev/tunnel"
)

// sourceOptions are the flags that say what there is to serve: a
// configuration file, or listeners and routes without one.
type sourceOptions struct {
	config string
	listen []string
	route  []string
	routes string
	admin  string
	zone   string
	agent  *agentFlags // of "culvert agent", in place of listen, route and routes
}

func (o *sourceOptions) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.config, "config", "", "configuration file, YAML")
	f.StringArrayVar(&o.listen, "listen", nil, "address to accept TLS and HTTP CONNECT at, udp://ADDR for QUIC, or fd:NAME of systemd; repeatable")
	f.StringArrayVar(&o.route, "route", nil, "NAME[:PORT]=HOST:PORT; repeatable. Without PORT, any port")
	f.StringVar(&o.routes, "routes", "", "file with a \"NAME[:PORT] HOST:PORT\" on each line")
	f.StringVar(&o.admin, "admin", "", "address of the admin port: health, metrics, tunnels, pprof; HOST:PORT on loopback, or unix:PATH")
	f.StringVar(&o.zone, "topology-zone", "", "the zone that the gateway is in, in place of topologyZone of the configuration")
	cmd.MarkFlagsMutuallyExclusive("config", "listen")
	cmd.MarkFlagsMutuallyExclusive("config", "route")
	cmd.MarkFlagsMutuallyExclusive("config", "routes")
	_ = cmd.MarkFlagFilename("config", "yaml", "yml")
}

// given reports whether any flag says what to serve.
func (o *sourceOptions) given() bool {
	return o.config != "" || len(o.route) > 0 || o.routes != ""
}

// load reads what the flags name.
func (o *sourceOptions) load() (*file.Config, error) {
	if o.agent != nil && o.config == "" {
		return o.agent.load()
	}
	if !o.given() {
		return nil, usageError("give --config FILE, or --listen ADDR with --route NAME=HOST:PORT", "nothing to serve")
	}
	if o.config != "" {
		c, err := file.Load(o.config)
		if err != nil {
			return nil, configError(err)
		}
		if o.agent != nil && c.Agent == nil {
			return nil, usageError("add agent: {gateway: HOST:PORT, key: NAME} to the file, or use culvert gateway", "%s has no agent", o.config)
		}
		if o.admin != "" {
			c.Admin = o.admin
		}
		o.setZone(c)
		return c, nil
	}
	if o.routes != "" {
		c, err := o.loadRoutes(o.routes, nil)
		if err != nil {
			return nil, configError(err)
		}
		return c, nil
	}
	c := file.Default()
	if err := o.addFlags(c); err != nil {
		return nil, err
	}
	var err error
	c.Services, err = o.flagRoutes()
	return c, err
}

// setZone gives c the zone of the flag, if there is one.
func (o *sourceOptions) setZone(c *file.Config) {
	if o.zone == "" {
		return
	}
	c.Mesh.TopologyZone = o.zone
	if c.Kubernetes != nil && c.Kubernetes.Discovery != nil {
		c.Kubernetes.Discovery.Zone = o.zone
	}
}

// addFlags adds the listeners and the admin port of flags.
func (o *sourceOptions) addFlags(c *file.Config) error {
	c.Admin = o.admin
	for _, l := range o.listen {
		if path, ok := unixsocket.Path(l); ok {
			if err := unixsocket.CheckPath(path); err != nil {
				return usageError("write unix:PATH; abstract sockets, and sockets with a mode or a group, are for configuration files", "--listen %q: %w", l, err)
			}
			c.Listeners = append(c.Listeners, file.Listener{Address: l, Refusal: "alert"})
			continue
		}
		if _, ok := activation.Name(l); ok {
			c.Listeners = append(c.Listeners, file.Listener{Address: l, Refusal: "alert"})
			continue
		}
		_, port, err := net.SplitHostPort(strings.TrimPrefix(l, udp.Scheme))
		if err == nil {
			_, err = strconv.ParseUint(port, 10, 16)
		}
		if err != nil {
			return usageError("write HOST:PORT or :PORT, udp://HOST:PORT for QUIC, unix:PATH, or fd:NAME for a socket of systemd", "--listen %q: %w", l, err)
		}
		c.Listeners = append(c.Listeners, file.Listener{Address: l, Refusal: "alert"})
	}
	return nil
}

// loadRoutes reads the routes file at path and adds the routes of flags: what
// one name leads to stands together, wherever it was said.
func (o *sourceOptions) loadRoutes(path string, current *file.Config) (*file.Config, error) {
	flags, err := o.flagRoutes()
	if err != nil {
		return nil, err
	}
	c, err := file.ReloadRoutes(path, current)
	if err != nil || c == current {
		return c, err
	}
	if len(flags) > 0 { // else they are joined
		c.Services = file.JoinRoutes(append(c.Services, flags...))
	}
	return c, o.addFlags(c)
}

// flagRoutes makes the services of --route.
func (o *sourceOptions) flagRoutes() ([]*registry.Service, error) {
	var services []*registry.Service
	for _, r := range o.route {
		s, err := file.ParseRoute(r)
		if err != nil {
			return nil, usageError("write --route NAME[:PORT]=HOST:PORT", "%w", err)
		}
		services = append(services, s)
	}
	return file.JoinRoutes(services), nil
}

// sources returns what feeds the registry, and the one that can reload.
func (o *sourceOptions) sources(c *file.Config, log *slog.Logger) ([]registry.Source, *file.Source) {
	if o.config != "" {
		src := &file.Source{Path: o.config, Log: log}
		return []registry.Source{src}, src
	}
	if o.routes != "" {
		src := &file.Source{Path: o.routes, Load: o.loadRoutes, Log: log}
		return []registry.Source{src}, src
	}
	return []registry.Source{registry.Static{Name: "flags", Snapshot: c.Snapshot()}}, nil
}

// A laterSource is a source that is there before anything runs, and after the Config that has it.
type laterSource struct{ registry.Source }

// gatewayConfig makes what gateway.New takes.
func gatewayConfig(c *file.Config) (gateway.Config, error) {
	cfg := gateway.Config{Site: c.Cluster, Mesh: c.Mesh, Lookup: new(dns.Resolver).Lookup, Version: version}
	if c.Agent != nil {
		cfg.Lookup = agentLookup(cfg.Sockets)
	}
	err := settings(c, &cfg)
	if err != nil {
		return cfg, err
	}
	cfg.SourceListeners = c.Snapshot().Listeners
	_, err = preparedListeners(&cfg) // "config check" is to know what the gateway can't serve
	return cfg, err
}

// settings sets what of cfg follows the file while the gateway runs.
func settings(c *file.Config, cfg *gateway.Config) (err error) {
	cfg.Limits = tunnel.Limits{
		FirstByteTimeout: c.Limits.FirstByteTimeout, HandshakeTimeout: c.Limits.HandshakeTimeout, MaxPendingConnections: c.Limits.MaxPendingConnections,
		MaxPendingPerClient: c.Limits.MaxPendingPerClient, MaxConnectionsPerClient: c.Limits.MaxConnectionsPerClient, ConnectionRatePerClient: c.Limits.ConnectionRatePerClient,
		MaxConnectionsPerPrincipal: c.Limits.MaxConnectionsPerPrincipal, ConnectionRatePerPrincipal: c.Limits.ConnectionRatePerPrincipal,
		MaxTunnels: c.Limits.MaxTunnels, ConnectTimeout: c.Limits.ConnectTimeout, ConnectTotalTimeout: c.Limits.ConnectTotalTimeout,
		IdleTimeout: c.Limits.IdleTimeout, UDPIdleTimeout: c.Limits.UDPIdleTimeout, HalfClosedTimeout: c.Limits.HalfClosedTimeout,
	}
	cfg.DrainDelay, cfg.DrainTimeout = orNone(c.Drain.Delay), orNone(c.Drain.Timeout)
	cfg.Via, cfg.Admin, cfg.AdminControl = pseudonym(c), c.Admin, c.Control
	if c.Admin != "" {
		// Here and not only where it is opened, so that "config check" knows.
		if err := admin.CheckAddr(c.Admin, false); err != nil {
			hint := "listen on 127.0.0.1, and have a program on this host pass it on"
			if _, socket := admin.SocketPath(c.Admin); socket {
				hint = "write unix:/run/culvert/admin.sock"
			}
			return usageError(hint, "%w", err)
		}
	}
	cfg.ReadFile, cfg.Issuers = os.ReadFile, issuers(c)
	if _, err := knownTokens(cfg.Issuers); err != nil {
		return err
	}
	if err := checkIdentity(c.Identity); err != nil {
		return err
	}
	if err := checkKube(c); err != nil {
		return err
	}
	if cfg.Peers, err = peersOf(c); err != nil {
		return err
	}
	cfg.Join, cfg.KnowsTrust = siteOf(c), func(name string) bool { return c.Identity != nil && c.Identity.Trust[name] != nil }
	cfg.Enrollment = enrollmentOf(c)
	cfg.ServicePorts, cfg.VIPs, cfg.Reverse = servicePorts(c), (*gateway.VIPs)(c.VIPs), reverseSessions(c)
	cfg.NAT, cfg.Replicas = natSettings(c), (*gateway.Replicas)(c.Replicas)
	cfg.UpstreamProxy, cfg.RunCommand = upstreamProxy(c), runCommand
	cfg.DNS, err = dnsServer(c)
	return err
}

// reverseSessions are those that c wants to have.
func reverseSessions(c *file.Config) *gateway.Reverse {
	if c.Reverse == nil {
		return nil
	}
	out := &gateway.Reverse{Gateways: c.Reverse.Gateways, Replicas: c.Reverse.Replicas, Pool: c.Reverse.Pool}
	for _, e := range c.Reverse.Expose {
		out.Expose = append(out.Expose, gateway.Exposed{
			Registration: reverse.Registration{Name: e.Name, Port: e.Port, Group: e.Group, Weight: e.Weight, Allow: e.Allow, Insecure: e.Insecure}, To: e.To,
		})
	}
	return out
}

// knownTokens returns the tokens of issuers, of which no keys are known.
func knownTokens(all []jwt.Issuer) (*jwt.Tokens, error) {
	t := &jwt.Tokens{Trust: new(identity.Store).Trust}
	if err := t.Use(all); err != nil {
		return nil, usageError("see identity.tokens in the configuration reference", "%w", err)
	}
	return t, nil
}

// issuers are those of c whose tokens listeners may accept.
func issuers(c *file.Config) []jwt.Issuer {
	if c.Identity == nil {
		return nil
	}
	all := make([]jwt.Issuer, len(c.Identity.Tokens))
	for n, i := range c.Identity.Tokens {
		all[n] = jwt.Issuer{
			URL: i.Issuer, TrustDomain: i.TrustDomain, Audiences: i.Audience, ID: i.ID, Claims: i.Claims, Kubernetes: i.Kubernetes, Header: i.Header, Signer: i.Signer,
			JWKS: i.Keys, JWKSURL: i.JWKSURL(), Roots: i.Roots, TokenFile: i.TokenFile,
		}
	}
	return all
}

// preparedListeners returns what a gateway of cfg would serve.
func preparedListeners(cfg *gateway.Config) ([]gateway.Listener, error) {
	all, err := gateway.Prepare(cfg.SourceListeners)
	if err != nil {
		return nil, usageError("names in tls must be in its certificates, and without names its certificates must have one that is not a wildcard", "%w", err)
	}
	return all, nil
}

// servicePorts are the ports that c has to give to services; nil for none.
func servicePorts(c *file.Config) *gateway.ServicePorts {
	if c.ServicePorts == nil {
		return nil
	}
	p := gateway.ServicePorts(*c.ServicePorts)
	return &p
}

// orNone makes the file's 0 the gateway's none: a file that says 0 means it.
func orNone(d time.Duration) time.Duration {
	if d == 0 {
		return -1
	}
	return d
}

// pseudonym is what this gateway calls itself in Via: it must differ between
// the gateways of a chain and be the same for the replicas of one. One out of the
// cluster has its id, too, and is in another network, or in none.
func pseudonym(c *file.Config) string {
	if c.Cluster != "" {
		name := "culvert-" + c.Cluster
		if c.Mesh.Network != "" {
			name += "-" + strings.Map(func(r rune) rune {
				switch {
				case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9':
					return r
				}
				return '-' // what a network is called may have anything in it
			}, c.Mesh.Network)
		}
		return name
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unnamed"
	}
	return "culvert-" + host + "-" + strconv.Itoa(os.Getpid())
}

// configError makes the mistakes of a file an error of exit code 2.
func configError(err error) error {
	var mistakes file.Errors
	if errors.As(err, &mistakes) {
		return &cliError{err: err, hint: "nothing was started; \"culvert config check FILE\" says the same without starting", code: exitUsage}
	}
	return usage(err)
}

// runRegistry returns a registry that holds what c says, for commands that
// ask and do not serve. Nothing is dialed: direct says only what may be.
func runRegistry(ctx context.Context, c *file.Config, direct *tunnel.NetDialer) (*registry.Registry, error) {
	transports := &upstream.Transports{Direct: direct}
	reg := &registry.Registry{Mesh: c.Mesh, Lookup: new(dns.Resolver).Lookup, NewTransport: transports.New}
	t, err := reg.Merge(c.Snapshot())
	if err != nil {
		return nil, err
	}
	reg.Swap(t)
	if c.VIPs != nil {
		list, err := gateway.ForecastVIPs(gateway.VIPs(*c.VIPs), t)
		if err != nil {
			return nil, stateError(err)
		}
		reg.AssignVIPs(list)
	}
	return reg, ctx.Err()
}
