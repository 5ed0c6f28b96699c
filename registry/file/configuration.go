package file

import "culvert.dev/registry"

// A configuration is the root of the file. The tag reload says what becomes of a change
// while a gateway runs: "live" that it is taken up. It holds for all below the key, but for
// fields further down with reload:"restart", which wait for a restart.
type configuration struct {
	Cluster      string        `yaml:"cluster" as:"cluster" reload:"live"`
	Zone         string        `yaml:"zone" as:"zone" reload:"live"`
	Network      string        `yaml:"network" reload:"live"`
	TopologyZone string        `yaml:"topologyZone" reload:"live"`
	Networks     []network     `yaml:"networks" what:"a network" reload:"live"`
	Peers        peers         `yaml:"peers" reload:"live"`
	Site         *Site         `yaml:"site" reload:"live"`
	Identity     *Identity     `yaml:"identity" reload:"live"`
	Enrollment   *Enrollment   `yaml:"enrollment" reload:"live"`
	Listeners    []Listener    `yaml:"listeners" what:"a listener" reload:"live"`
	ServicePorts *ServicePorts `yaml:"servicePorts" reload:"live"`
	VIPs         *VIPs         `yaml:"vips" reload:"live"`
	NAT          *NAT          `yaml:"nat" reload:"live"`
	DNS          *DNS          `yaml:"dns" reload:"live"`
	Kubernetes   *Kubernetes   `yaml:"kubernetes" reload:"live"`

	Agent    *Agent           `yaml:"agent" reload:"live"`
	Reverse  *reverseSessions `yaml:"reverse" reload:"live"`
	Replicas *replicaSet      `yaml:"replicas" reload:"live"`

	UpstreamProxy *UpstreamProxy `yaml:"upstreamProxy" reload:"live"`

	Admin        string   `yaml:"admin" as:"adminAddress" reload:"live"`
	AdminControl bool     `yaml:"adminControl" reload:"live"`
	Limits       Limits   `yaml:"limits" reload:"live"`
	Drain        Drain    `yaml:"drain" reload:"live"`
	Log          Log      `yaml:"log" reload:"live"`
	Policies     policies `yaml:"policies" reload:"live"`
	Services     services `yaml:"services" reload:"live"`
}

// config returns c as the rest of the program has it.
func (c *configuration) config() *Config {
	out := &Config{
		Cluster: c.Cluster, Mesh: registry.Mesh{Zone: c.Zone, Network: c.Network}, Listeners: c.Listeners,
		Admin: c.Admin, Control: c.AdminControl, Limits: c.Limits, Drain: c.Drain, Log: c.Log, Services: c.Services, Policies: c.Policies,
		ServicePorts: c.ServicePorts, VIPs: c.VIPs, NAT: c.NAT, DNS: c.DNS, Kubernetes: c.Kubernetes, Identity: c.Identity, Peers: c.Peers, Site: c.Site, Enrollment: c.Enrollment, Agent: c.Agent, Reverse: c.Reverse.registered(), UpstreamProxy: c.UpstreamProxy, Replicas: c.Replicas.registered(),
	}
	if out.Mesh.TopologyZone = c.TopologyZone; c.TopologyZone == "" && c.Kubernetes != nil && c.Kubernetes.Discovery != nil {
		out.Mesh.TopologyZone = c.Kubernetes.Discovery.Zone
	}
	for i := range c.Networks {
		out.Networks = append(out.Networks, c.Networks[i].registered())
	}
	if k := c.Kubernetes; k != nil && k.Discovery != nil && k.Discovery.GatewayTransport != nil {
		hop := k.Discovery.GatewayTransport.registered()
		out.GatewayTransport = &hop
	}
	return out
}
