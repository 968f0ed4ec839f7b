// The version of these scripts. A browser may have kept those of an older pack; then the server's
// status says another one, and the panel asks for a reload.
export const VERSION = "0.1.0";
