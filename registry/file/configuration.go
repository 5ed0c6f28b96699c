package file

import "culvert.dev/registry"

// A configuration is the root of the file.
type configuration struct {
	Cluster      string        `yaml:"cluster" as:"cluster"`
	Zone         string        `yaml:"zone" as:"zone"`
	Network      string        `yaml:"network"`
	Networks     []network     `yaml:"networks" what:"a network"`
	Listeners    []Listener    `yaml:"listeners" what:"a listener"`
	ServicePorts *ServicePorts `yaml:"servicePorts"`
	VIPs         *VIPs         `yaml:"vips"`
	DNS          *DNS          `yaml:"dns"`
	Kubernetes   *Kubernetes   `yaml:"kubernetes"`
	Admin        string        `yaml:"admin" as:"adminAddress"`
	AdminControl bool          `yaml:"adminControl"`
	Limits       Limits        `yaml:"limits"`
	Drain        Drain         `yaml:"drain"`
	Log          Log           `yaml:"log"`
	Services     services      `yaml:"services"`
}

// config returns c as the rest of the program has it.
func (c *configuration) config() *Config {
	out := &Config{
		Cluster: c.Cluster, Mesh: registry.Mesh{Zone: c.Zone, Network: c.Network}, Listeners: c.Listeners,
		Admin: c.Admin, Control: c.AdminControl, Limits: c.Limits, Drain: c.Drain, Log: c.Log, Services: c.Services,
		ServicePorts: c.ServicePorts, VIPs: c.VIPs, DNS: c.DNS, Kubernetes: c.Kubernetes,
	}
	for i := range c.Networks {
		out.Networks = append(out.Networks, c.Networks[i].registered())
	}
	return out
}
