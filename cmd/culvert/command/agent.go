package command

import (
	"bytes"
	"encoding/json"
	"errors"
	"net"
	"strings"

	"github.com/spf13/cobra"

	"culvert.dev/registry/file"
)

// agentFlags say what "agent" of a configuration file does.
type agentFlags struct {
	gatewayAccess
	gateways []string
	names    []string
	proxy    string
	forwards []string // LOCAL=NAME[:PORT]
	dns      []string // HOST:PORT, for UDP and TCP
	upstream string   // URL of a proxy on the way to the gateways
}

func newAgent() *cobra.Command {
	var o gatewayOptions
	var a agentFlags
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Reach the services behind gateways from this machine",
		Long: `Agent lets the programs of this machine reach the services behind gateways, with
no VPN. A program asks the agent for a service by its name: by HTTP CONNECT or
SOCKS5 at one port of loopback, or at a port or Unix socket that leads to one
service. The agent asks a gateway, by TLS and with the agent's own credentials,
and passes the bytes on as they are. A name that the gateway does not have, or
does not let the agent reach, is refused with the reason of the gateway. The
agent never dials a service directly. It learns from the gateways which services
it may see, for the PAC file of browsers and for culvert registry ls.

After culvert join, no flag is needed: the gateway and the identity are those that
the device has from there, and its certificate is renewed.

It is "culvert gateway" with the part "agent" of a configuration file, or with
flags in its place: what a gateway can do, an agent can.`,
		Example: `  culvert agent
  culvert agent --gateway gw.example --cert me.pem --key me.key --ca ca.pem
  culvert agent --gateway gw1.example --gateway gw2.example:8443 --cert me.pem --forward 5432=db.shop.example
  culvert agent --gateway gw.example --token-file token --name '*.shop.example' --forward unix:/run/user/1000/redis=cache.shop.example:6379
  culvert agent --config agent.yaml`,
		Args: args(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop, now := signals(cmd.Context())
			defer stop()
			o.agent = &a
			return runGateway(ctx, now, cmd.ErrOrStderr(), &o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.config, "config", "", "configuration file with the part agent, YAML, in place of the flags below")
	a.addGateway(cmd)
	f.StringArrayVar(&a.names, "name", nil, "`NAME` that the gateways are asked for, or *.NAME; repeatable (default: every name)")
	f.StringVar(&a.proxy, "proxy", "", "where programs ask by CONNECT and SOCKS5: HOST:PORT on loopback, unix:PATH, or fd:NAME of systemd (default: 127.0.0.1:1080)")
	f.StringArrayVar(&a.forwards, "forward", nil, "`LOCAL=NAME[:PORT]`: a port of loopback, unix:PATH, or fd:NAME of systemd, that leads to one service; repeatable")
	f.StringArrayVar(&a.dns, "dns", nil, "`HOST:PORT` on loopback where the names are answered by DNS; repeatable (default: nowhere)")
	f.StringVar(&o.admin, "admin", "", "address of the admin port: health, metrics, tunnels, pprof; HOST:PORT on loopback, or unix:PATH")
	for _, name := range []string{"name", "proxy", "forward", "dns"} {
		cmd.MarkFlagsMutuallyExclusive("config", name)
		_ = cmd.RegisterFlagCompletionFunc(name, cobra.NoFileCompletions)
	}
	o.addRuntime(cmd)
	return cmd
}

// gatewayFlags are the flags that addGateway makes.
var gatewayFlags = append([]string{"gateway", "peer", "upstream-proxy"}, gatewayAccessFlags...)

// addGateway adds the flags that say which gateways are asked, and who asks. The flag config is
// there already.
func (a *agentFlags) addGateway(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringArrayVar(&a.gateways, "gateway", nil, "`HOST[:PORT]` of a gateway (default port: 443); repeatable")
	f.StringVar(&a.upstream, "upstream-proxy", "", "`URL` of the HTTP proxy through which the gateways are reached; one that asks for a password needs --config")
	a.gatewayAccess.add(cmd, "gateway", "peer")
	for _, name := range gatewayFlags {
		cmd.MarkFlagsMutuallyExclusive("config", name)
	}
	_ = cmd.MarkFlagFilename("config", "yaml", "yml")
	for _, name := range []string{"gateway", "upstream-proxy"} {
		_ = cmd.RegisterFlagCompletionFunc(name, cobra.NoFileCompletions)
	}
}

// check finds mistakes in the flags, and puts the defaults in.
func (a *agentFlags) check() error {
	if err := a.useJoined(); err != nil {
		return err
	}
	if len(a.gateways) == 0 {
		if a.joined == nil {
			return usageError("add --gateway HOST[:PORT], or --config FILE, or run culvert join with a token of a gateway first", "no gateway is named, and this machine has not joined one")
		}
		a.gateways = []string{a.joined.Gateway}
	}
	for i, to := range a.gateways {
		a.gateways[i] = withPort(to, "443")
	}
	return a.gatewayAccess.check()
}

// withPort returns HOST:PORT of an address that may have no port.
func withPort(address, port string) string {
	if _, _, err := net.SplitHostPort(address); err == nil {
		return address
	}
	return net.JoinHostPort(strings.Trim(address, "[]"), port)
}

// load returns what a file with "agent" for these flags would be. Its parser checks the rest.
func (a *agentFlags) load() (*file.Config, error) {
	if err := a.check(); err != nil {
		return nil, err
	}
	agent, identity := map[string]any{"gateway": a.gateways}, map[string]any{}
	if m := a.joined; m != nil {
		identity = joinedIdentity(m, a.state)
		agent["key"], agent["trust"], agent["peers"] = joinedKey, m.TrustDomain, []string{m.GatewayID}
		agent["catalog"] = map[string]any{"state": a.state}
		if m.Transport == "connect" {
			agent["transports"] = []string{"connect", "connect-h2", "connect-h3", "websocket"}
		}
	}
	// By name, so that the files are followed: short-lived certificates are renewed.
	if a.cert != "" {
		agent["key"] = "agent"
		identity["keys"] = map[string]any{"agent": map[string]any{"certificateFile": a.cert, "keyFile": a.key}}
	}
	for key, value := range map[string]string{"caFile": a.ca, "tokenFile": a.token, "serverName": a.serverName, "proxy": a.proxy} {
		if value != "" {
			agent[key] = value
		}
	}
	for key, list := range map[string][]string{"peers": a.peers, "names": a.names} {
		if len(list) > 0 {
			agent[key] = list
		}
	}
	forwards := map[string]string{}
	for _, f := range a.forwards {
		local, name, ok := strings.Cut(f, "=")
		if !ok {
			return nil, usageError("write LOCAL=NAME[:PORT], such as 5432=db.shop.example", "--forward %q names no service", f)
		}
		if forwards[local] != "" {
			return nil, usageError("give each service a LOCAL of its own", "--forward %q: %s leads to %q already", f, local, forwards[local])
		}
		forwards[local] = name
	}
	if len(forwards) > 0 {
		agent["forwards"] = forwards
	}
	if len(a.dns) > 0 {
		var listen []string
		for _, address := range a.dns {
			listen = append(listen, "udp://"+address, "tcp://"+address)
		}
		agent["dns"] = map[string]any{"listen": listen}
	}
	content := map[string]any{"agent": agent, "identity": identity}
	if a.upstream != "" {
		content["upstreamProxy"] = a.upstream
	}
	return loadFlags(content)
}

// loadFlags returns the configuration that flags stand for. Its parser checks them.
func loadFlags(content map[string]any) (*file.Config, error) {
	text, err := json.Marshal(content) // which is YAML, too
	if err != nil {
		return nil, err
	}
	c, err := file.LoadFrom("flags", bytes.NewReader(text))
	var mistakes file.Errors
	if errors.As(err, &mistakes) && len(mistakes) > 0 { // where they stand in that text helps nobody
		msg, hint := mistakes[0].Msg, mistakes[0].Hint
		if content["identity"] == nil { // else the files are those of a device that has joined
			msg, hint = inFlags(msg), inFlags(hint)
		}
		return nil, usageError(hint, "%s", msg)
	}
	return c, usageOrNil(err)
}

// inFlags returns what the parser says of keys in words of flags.
func inFlags(text string) string {
	if strings.Contains(text, "relative to the configuration file") {
		return ""
	}
	return strings.NewReplacer("certificateFile", "--cert", "keyFile", "--key", "caFile", "--ca", "tokenFile", "--token-file").Replace(text)
}
